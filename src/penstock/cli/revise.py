"""`penstock revise`: compare recorded steps with their plan, and plan again."""

from pathlib import Path

import click
from rich.console import Console

from penstock.cli import options, reports
from penstock.cli.progress import show_solving
from penstock.planner.plans import Plan
from penstock.planner.revision import revise
from penstock.sim.review import review
from penstock.view.sources import read_recorded

__all__ = ["revise_command"]


@click.command("revise")
@click.argument("plan_file", metavar="PLAN", type=options.INPUT_FILE)
@click.argument("steps", metavar="STEP...", type=options.INPUT_FILE, nargs=-1, required=True)
@options.SOLVER_SECONDS
@click.option(
    "--least-gain",
    type=click.FloatRange(0, 1),
    default=0.02,
    show_default=True,
    help="Smallest share of a step that a new plan must save.",
)
@click.option(
    "-o",
    "--output",
    type=options.OUTPUT_FILE,
    help="Write the better plan, with the recorded costs, as JSON.",
)
def revise_command(
    plan_file: Path,
    steps: tuple[Path, ...],
    seconds: float,
    least_gain: float,
    output: Path | None,
) -> None:
    """Compare recorded steps with their plan, and plan again if that is worth it.

    PLAN is the plan.json of `penstock plan`. A STEP is a timeline that was recorded with
    `step(..., record=True)` and written with `write_timeline`, or a trace of it.

    \b
    Example:
      penstock revise plan/plan.json step0.json step1.json -o better.json
    """
    old = Plan.from_file(plan_file)
    timelines = [read_recorded(step) for step in steps]
    with show_solving(Console(stderr=True), seconds) as progress:
        found = revise(old, *timelines, seconds=seconds, least_gain=least_gain, progress=progress)
    for step, timeline in zip(steps, timelines, strict=True):
        click.echo(f"{step}\n{review(old.timeline, timeline)}\n")
    click.echo(str(found))
    if output is not None:
        found.best.to_file(output)
        reports.announce(output)
