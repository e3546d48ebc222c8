"""`penstock playground`: every family in one page, to play with in a browser."""

from pathlib import Path

import click

from penstock.atomic_files import write_atomically
from penstock.cli import options, reports
from penstock.view import playground

__all__ = ["playground_command"]


@options.command("playground")
@click.option(
    "-o",
    "--output",
    "file",
    type=options.OUTPUT_FILE,
    default=Path("playground.html"),
    show_default=True,
    help="The page to write.",
)
def playground_command(file: Path) -> None:
    """Write a page in which schedules can be priced, played, changed and checked.

    It needs no server and no network: open the file in a browser. Ranks, microbatches and costs
    are sliders, and every family is shown side by side.

    \b
    Example:
      penstock playground -o playground.html
    """
    write_atomically(file, playground.playground())
    reports.announce(file)
