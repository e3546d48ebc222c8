"""`penstock revise`: compare recorded steps with their plan, and plan again."""

from pathlib import Path

import click
from rich.console import Console

from penstock import planner, view
from penstock.cli import options, reports, reviews
from penstock.cli.waiting.progress import show_solving
from penstock.planner.plans import Plan
from penstock.sim.recorded.review import review
from penstock.view.sources import read_recorded

__all__ = ["revise_command"]


@options.command("revise")
@click.argument("plan_file", metavar="PLAN", type=options.INPUT_FILE)
@click.argument("steps", metavar="STEP...", type=options.INPUT_FILES, nargs=-1, required=True)
@options.SOLVER_SECONDS
@click.option(
    "--least-gain",
    type=options.SHARE,
    metavar="SHARE",
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
@options.HTML
@options.JSON
def revise_command(
    plan_file: Path,
    steps: tuple[Path, ...],
    seconds: float,
    least_gain: float,
    output: Path | None,
    html_file: Path | None,
    as_json: bool,
) -> None:
    """Compare recorded steps with their plan, and plan again if that is worth it.

    PLAN is the plan.json of `penstock plan`. A STEP is a timeline that was recorded with
    `step(..., record=True)` and written with `write_timeline`, or a trace of it.

    Printed are the seconds of every rank, kind and stage, predicted and recorded; what explains
    the difference, in seconds that add up to it; and what a new plan would gain at the recorded
    costs. The page has the predicted and the recorded steps below one another.

    \b
    Example:
      penstock revise plan/plan.json step0.json step1.json -o better.json
    """
    old = Plan.from_file(plan_file)
    timelines = [read_recorded(step) for step in steps]
    with show_solving(Console(stderr=True), seconds) as progress:
        found = planner.revise(
            old, *timelines, seconds=seconds, least_gain=least_gain, progress=progress
        )
    reviewed = [review(old.timeline, timeline) for timeline in timelines]
    if as_json:
        click.echo(reports.to_json(reviews.revision_values(found, reviewed)))
    else:
        for step, timeline, compared in zip(steps, timelines, reviewed, strict=True):
            click.echo(f"{step}\n{reviews.review_text(compared, timeline)}\n")
        click.echo("\n".join(filter(None, (str(found), found.remark))))
    named = {"predicted": old.timeline}
    named |= {f"recorded: {step.name}": one for step, one in zip(steps, timelines, strict=True)}
    reports.write_views(view.Comparison(named), html_file, ())
    if output is not None:
        found.best.to_file(output)
        reports.announce(output)
