"""`penstock check`: prove that a schedule is complete and finishes."""

import sys

import click

from penstock.assembly import lower
from penstock.checks.deadlock import Channels
from penstock.checks.report import find_problems
from penstock.cli import inputs, options, reports

__all__ = ["check_command"]


@options.command("check")
@options.schedule_argument(metavar="SCHEDULE")
@options.with_size
@options.LOWER
@click.option(
    "--channels",
    type=click.Choice(["directed", "shared"]),
    default="directed",
    show_default=True,
    help="One queue per direction of a pair of ranks, or one per pair.",
)
@options.JSON
def check_command(
    schedule: str, size: options.Size, lowered: bool, channels: Channels, as_json: bool
) -> None:
    """Prove that a schedule is complete and will finish, or say what is wrong.

    \b
    Examples:
      penstock check mine.csv
      penstock check mine.csv --lower --channels shared
    """
    found = inputs.load(schedule, size).schedule
    problems = find_problems(found, channels=channels)
    if lowered and not problems:
        found = lower(found)
        problems = find_problems(found, channels=channels)
    if as_json:
        click.echo(reports.to_json(reports.check_result(found, problems)))
    elif problems:
        for problem in problems:
            click.echo(str(problem))
    else:
        click.echo(f"valid: {reports.describe(found)}; it finishes ({channels} channels)")
    sys.exit(1 if problems else 0)
