"""`penstock revise`: a plan and recorded steps of it, predicted beside real, and a better plan."""

from pathlib import Path

import click
from rich.console import Console

from penstock.cli import inputs
from penstock.cli.solver_progress import show_solving
from penstock.files.timeline import read_timeline
from penstock.planner.plans import Plan
from penstock.planner.revision import revise
from penstock.sim.review import review

__all__ = ["revise_command"]


@click.command("revise")
@click.argument("plan_file", metavar="PLAN", type=inputs.FILE)
@click.argument("steps", metavar="STEP...", type=inputs.FILE, nargs=-1, required=True)
@click.option(
    "--seconds", type=click.FloatRange(0), default=5.0, show_default=True, help="Time to solve."
)
@click.option(
    "--least-gain",
    type=click.FloatRange(0, 1),
    default=0.02,
    show_default=True,
    help="The share of a step that a new plan must save to be offered.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the plan to go on with, at the recorded costs, as JSON.",
)
def revise_command(
    plan_file: Path,
    steps: tuple[Path, ...],
    seconds: float,
    least_gain: float,
    output: Path | None,
) -> None:
    """Hold recorded steps against the plan that they ran, and plan anew if that is worth it.

    PLAN is what `penstock plan` wrote as plan.json. A STEP is a timeline that was recorded with
    `step(..., record=True)` and written by `penstock.files.timeline.write_timeline`.

    \b
    Example:
      penstock revise plan/plan.json step0.json step1.json -o better.json
    """
    old = Plan.from_file(plan_file)
    timelines = [read_timeline(step) for step in steps]
    with show_solving(Console(stderr=True), seconds) as progress:
        found = revise(old, *timelines, seconds=seconds, least_gain=least_gain, progress=progress)
    for step, timeline in zip(steps, timelines, strict=True):
        click.echo(f"{step}\n{review(old.timeline, timeline)}\n")
    click.echo(str(found))
    if output is not None:
        found.best.to_file(output)
        click.echo(f"wrote {output}", err=True)
