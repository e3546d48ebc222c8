"""`penstock trace`: pictures and numbers of recorded steps and traces."""

from pathlib import Path

import click

from penstock import view
from penstock.cli import options, reports
from penstock.view.sources import read_recorded
from penstock.view.text.tables import rank_table, summary_table

__all__ = ["trace_command"]


@options.command("trace")
@click.argument("files", metavar="FILE...", type=options.INPUT_FILES, nargs=-1, required=True)
@click.option(
    "--step",
    type=int,
    metavar="N",
    default=-1,
    show_default=True,
    help="Which of several profiled steps, from 0; -1 is the last.",
)
@click.option(
    "--csv", "csv_file", type=options.OUTPUT_FILE, help="Write the recorded order as a schedule."
)
@options.HTML
@options.with_figures
@options.JSON
def trace_command(
    files: tuple[Path, ...],
    step: int,
    csv_file: Path | None,
    html_file: Path | None,
    figures: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Show a recorded step: the timeline, and time, idle time and memory per rank.

    A FILE is a recorded timeline (`write_timeline`), a trace (`penstock show --trace` or
    `write_trace`), or what torch's profiler exports of a step of a pipeline: then give the files
    of all ranks. Traces may be compressed with gzip.

    \b
    Examples:
      penstock trace recorded.json
      penstock trace rank0.json.gz rank1.json.gz --step 0 --csv ran.csv
    """
    timeline = read_recorded(*files, step=step)
    if csv_file is not None:
        timeline.schedule.to_csv(csv_file)
        reports.announce(csv_file)
    reports.write_views(timeline, html_file, figures)
    if as_json:
        values = reports.schedule(timeline.schedule) | reports.timeline(timeline)
        click.echo(reports.to_json(values))
        return
    console = reports.make_console()
    console.print(view.draw(timeline))
    console.print()
    console.print(summary_table({timeline.schedule.name: timeline}))
    console.print()
    console.print(rank_table(timeline))
