"""`penstock trace`: from trace files to the pictures and numbers of what they recorded."""

from pathlib import Path

import click
from rich.console import Console

from penstock.cli import inputs, reports
from penstock.files.trace.reading import read_trace
from penstock.view import figure, terminal
from penstock.view.page.html import page

__all__ = ["trace_command"]

_FILE = click.Path(dir_okay=False, path_type=Path, writable=True)


@click.command("trace")
@click.argument("files", metavar="FILE...", type=inputs.FILE, nargs=-1, required=True)
@click.option(
    "--step",
    type=int,
    default=-1,
    show_default=True,
    help="Which of several profiled steps, from 0; -1 is the last.",
)
@click.option("--csv", "csv_file", type=_FILE, help="Write what ran as a schedule.")
@click.option("--html", "html_file", type=_FILE, help="Write a page to look at it in a browser.")
@inputs.with_figures
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of pictures.")
def trace_command(
    files: tuple[Path, ...],
    step: int,
    csv_file: Path | None,
    html_file: Path | None,
    figures: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Show what a trace has recorded: the timeline, and time, idle time and memory per rank.

    A FILE is a trace that `penstock show --trace` or `penstock.view.trace.write_trace` wrote, or
    what torch's profiler exports of a step of a pipeline: then give the files of all ranks. Each
    may be compressed with gzip.

    \b
    Examples:
      penstock trace step.json
      penstock trace rank0.json.gz rank1.json.gz --step 0 --csv ran.csv
    """
    timeline = read_trace(*files, step=step)
    if csv_file is not None:
        timeline.schedule.to_csv(csv_file)
    if html_file is not None:
        html_file.write_text(page(timeline), encoding="utf-8")
    for path in figures:
        figure.save(figure.draw(timeline), path)
    for written in (csv_file, html_file, *figures):
        if written is not None:
            click.echo(f"wrote {written}", err=True)
    if as_json:
        told = reports.schedule(timeline.schedule) | reports.timeline(timeline)
        click.echo(reports.to_json(told))
        return
    console = Console(soft_wrap=False, highlight=False)
    console.print(reports.picture(console, timeline))
    console.print()
    console.print(terminal.summary_table({timeline.schedule.name: timeline}))
    console.print()
    console.print(terminal.rank_table(timeline))
