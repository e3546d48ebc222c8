"""`penstock list` and `penstock show`: the families, and pictures of schedules."""

from pathlib import Path

import click

from penstock import view
from penstock.cli import inputs, options, reports
from penstock.costs import Costs
from penstock.schedules.registry import FAMILIES

__all__ = ["list_command", "show_command"]


@options.command("list")
@options.JSON
def list_command(as_json: bool) -> None:
    """List the families of schedules.

    \b
    Example:
      penstock list
    """
    if as_json:
        click.echo(reports.to_json(reports.families()))
    else:
        reports.make_console().print(reports.family_table(FAMILIES.values()))


@options.command("show")
@options.schedule_argument(metavar="SCHEDULE")
@options.with_size
@options.with_costs
@options.LOWER
@click.option("--table", "as_table", is_flag=True, help="Print actions as text, ranks across.")
@click.option(
    "--csv", "csv_file", type=options.OUTPUT_FILE, help="Write the schedule, one row per rank."
)
@click.option(
    "--trace", "trace_file", type=options.OUTPUT_FILE, help="Write a trace for ui.perfetto.dev."
)
@options.HTML
@options.with_figures
@options.JSON
def show_command(
    schedule: str,
    size: options.Size,
    costs: Costs | None,
    lowered: bool,
    as_table: bool,
    csv_file: Path | None,
    trace_file: Path | None,
    html_file: Path | None,
    figures: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Draw a schedule to scale, in the terminal or as a figure.

    A plan is drawn with its own costs, and a recorded step with its own times, unless costs are
    given. A single number is the cost of one rank's share of the model; several are for stages.

    \b
    Examples:
      penstock show 1F1B --ranks 4 --microbatches 8
      penstock show ZBV -r 8 -m 16 --transfer 0.2 --pdf zbv.pdf --html zbv.html
      penstock show mine.csv --lower --table
      penstock show plan.json
    """
    loaded = inputs.load_checked(schedule, size, lowered=lowered)
    timeline = loaded.price(costs)
    if csv_file is not None:
        loaded.schedule.to_csv(csv_file)
        reports.announce(csv_file)
    if trace_file is not None:
        view.write_trace(timeline, trace_file)
        reports.announce(trace_file)
    reports.write_views(timeline, html_file, figures)
    if as_json:
        values = reports.schedule(loaded.schedule) | reports.timeline(timeline)
        click.echo(reports.to_json(values))
    elif as_table:
        click.echo(str(loaded.schedule))
    else:
        reports.make_console().print(view.draw(timeline))
