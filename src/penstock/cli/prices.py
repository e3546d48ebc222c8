"""`penstock simulate` and `penstock compare`: what schedules cost."""

from pathlib import Path

import click

from penstock import view
from penstock.cli import inputs, options, reports
from penstock.cli.projection.workload import throughput_values, with_workload
from penstock.costs import Costs
from penstock.sim.period import Boundary
from penstock.sim.throughput import Workload
from penstock.view.text.tables import rank_table, summary_table

__all__ = ["compare_command", "simulate_command"]


@options.command("simulate")
@options.schedule_argument(metavar="SCHEDULE")
@options.with_size
@options.with_costs
@options.LOWER
@options.BOUNDARY
@options.JSON
def simulate_command(
    schedule: str,
    size: options.Size,
    costs: Costs | None,
    lowered: bool,
    boundary: Boundary,
    as_json: bool,
) -> None:
    """Price a schedule: time, idle time and memory of every rank.

    A single number is the cost of one rank's share of the model; several are for its stages.
    A step costs the time until the last rank ends, unless --boundary says that ranks do not wait
    for each other between steps.

    \b
    Examples:
      penstock simulate ZB-H2 -r 8 -m 24 --forward 18.5 --backward-input 18.1 \\
          --backward-weight 9.3 --transfer 0.6
      penstock simulate mine.csv --costs costs.toml --json
      penstock simulate plan.json
    """
    timeline = inputs.load_checked(schedule, size, lowered=lowered).price(costs)
    if as_json:
        click.echo(reports.to_json(reports.timeline(timeline, boundary)))
        return
    console = reports.make_console()
    console.print(summary_table({timeline.schedule.name: timeline}, boundary))
    console.print()
    console.print(rank_table(timeline, boundary))


@options.command("compare")
@options.schedule_argument("schedules", several=True, metavar="SCHEDULE...")
@options.with_size
@options.with_costs
@options.BOUNDARY
@click.option("--draw", "is_drawn", is_flag=True, help="Draw each schedule too.")
@options.HTML
@options.with_figures
@with_workload
@options.JSON
def compare_command(
    schedules: tuple[str, ...],
    size: options.Size,
    costs: Costs | None,
    boundary: Boundary,
    is_drawn: bool,
    html_file: Path | None,
    figures: tuple[Path, ...],
    workload: Workload | None,
    as_json: bool,
) -> None:
    """Price schedules side by side for the same model; ratios are to the first.

    A single number is the cost of one rank's share of the model, so that schedules with one and
    with several stages per rank compare fairly. If no costs are given, recorded steps keep their
    times, and the others get the costs of the first plan or recorded step. With --tokens the
    table has tokens per second, and MFU with the FLOPs of a token and the peak of a device.

    \b
    Examples:
      penstock compare 1F1B ZB-H1 ZBV DualPipeV -r 8 -m 24 --transfer 0.1
      penstock compare 1F1B mine.csv --costs costs.toml --draw --png both.png
      penstock compare plan.json 1F1B -r 2 -m 8 --html both.html
    """
    loaded = [inputs.load_checked(schedule, size) for schedule in schedules]
    timelines = inputs.price_alike(loaded, costs)
    comparison = view.Comparison(timelines, boundary, workload)
    reports.write_views(comparison, html_file, figures)
    if as_json:
        values = {name: reports.timeline(found, boundary) for name, found in timelines.items()}
        if workload is not None:
            for name, found in timelines.items():
                achieved = workload.at(
                    found.period(boundary),
                    ranks=found.schedule.num_ranks,
                    microbatches=found.schedule.microbatches,
                )
                values[name]["throughput"] = throughput_values(achieved)
        click.echo(reports.to_json(values))
        return
    reports.make_console().print(view.draw(comparison) if is_drawn else comparison)
