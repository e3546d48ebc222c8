"""`penstock curve`: how many seconds more memory saves, and what no order can beat."""

from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console

from penstock import planner, view
from penstock.cli import options, reports
from penstock.cli.waiting.progress import show_solving
from penstock.planner.search.layouts import Layout
from penstock.sim.period import Boundary

__all__ = ["curve_command"]


@options.command("curve")
@click.argument("costs_file", metavar="[COSTS]", type=options.INPUT_FILE, required=False)
@options.ranks_option(4)
@options.MICROBATCHES
@click.option(
    "--memory",
    "limits",
    type=options.Bytes(),
    multiple=True,
    help="A memory limit per rank, such as 40GiB; give it several times. [default: even steps]",
)
@click.option(
    "--points",
    type=options.COUNT,
    metavar="N",
    default=8,
    show_default=True,
    help="Number of limits if none are given.",
)
@click.option(
    "--placement",
    type=click.Choice(["loop", "interleaved", "v"]),
    help="Placement of stages on ranks. [default: the fastest that the costs allow]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    help="Time limit of the solver for each point.",
)
@options.BOUNDARY
@options.with_figures
@options.JSON
@options.with_given_costs
def curve_command(
    costs_file: Path | None,
    ranks: int,
    microbatches: int,
    limits: tuple[float, ...],
    points: int,
    placement: Layout | None,
    seconds: float,
    boundary: Boundary,
    figures: tuple[Path, ...],
    as_json: bool,
    given_costs: Mapping[str, object],
) -> None:
    """Plan for growing memory limits, and show time against memory beside the proven bound.

    COSTS are those of `penstock plan`; they must have bytes.

    \b
    Examples:
      penstock curve costs.toml --ranks 8 --microbatches 32 --svg curve.svg
      penstock curve -r 4 -m 8 --activation-bytes 1e9 --memory 3GB --memory 4GB
    """
    costs = options.merge_costs(costs_file, given_costs)
    with show_solving(Console(stderr=True), seconds) as progress:
        found = planner.memory_curve(
            costs,
            ranks=ranks,
            microbatches=microbatches,
            limits=limits or None,
            points=points,
            placement=placement,
            boundary=boundary,
            seconds=seconds,
            progress=progress,
        )
    for path in figures:
        view.save(found, path)
        reports.announce(path)
    if as_json:
        values = [
            {
                "memory": point.memory,
                "seconds": point.seconds,
                "lower_bound": point.lower_bound,
                "peak_bytes": point.plan.timeline.peak_bytes,
                "order": point.plan.schedule.name,
            }
            for point in found.points
        ]
        click.echo(reports.to_json({"boundary": boundary, "points": values}))
        return
    reports.make_console().print(view.draw(found))
