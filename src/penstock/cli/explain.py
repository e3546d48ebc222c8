"""`penstock explain` for flight records: what the ranks of a run were doing when it ended."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from penstock.cli import reports
from penstock.files.flight.timeline import RecordedStep, last_recorded_step
from penstock.files.flight.waits import Flight, read_flights
from penstock.view.flight_report import flight_view, step_title
from penstock.view.page.html import page

__all__ = ["explain_flights", "names_flights"]

# Beyond this a picture of one line per rank is no longer seen as one.
_MOST_LANES = 64


def names_flights(sources: Sequence[str]) -> bool:
    """Whether what a command was given are flight records rather than a schedule."""
    return Path(sources[0]).is_dir() or sources[0].endswith(".flight")


def explain_flights(
    console: Console, sources: Sequence[str], html_file: Path | None, *, as_json: bool
) -> None:
    """Say where every rank was, who held up whom, and draw the last step as far as it got."""
    flight = read_flights(sources)
    step = last_recorded_step(flight)
    if html_file is not None and step is not None:
        html_file.write_text(page({step_title(step): step.timeline}), encoding="utf-8")
        click.echo(f"wrote {html_file}", err=True)
    if as_json:
        click.echo(reports.to_json(_values(flight, step)))
        return
    console.print(flight_view(flight))
    if step is None:
        console.print("\nno rank has computed anything that the records still tell of")
        return
    console.print(f"\n{step_title(step)}", markup=False)
    if flight.num_ranks <= _MOST_LANES:
        console.print(reports.picture(console, step.timeline))
    else:
        console.print(f"(a picture of {flight.num_ranks} ranks is for --html FILE)")


def _values(flight: Flight, step: RecordedStep | None) -> dict[str, object]:
    """What the records say as plain values."""
    return {
        "schedule": flight.schedule,
        "ranks": flight.num_ranks,
        "missing": list(flight.missing),
        "end": flight.end,
        "last_step": None if step is None else step.step,
        "per_rank": [_rank_values(flight, rank) for rank in flight.logs],
        "causes": [
            {
                "reason": cause.reason.name.lower(),
                "ranks": list(cause.ranks),
                "waiting": list(cause.waiting),
            }
            for cause in flight.causes
        ],
    }


def _rank_values(flight: Flight, rank: int) -> dict[str, object]:
    log = flight.logs[rank]
    record = log.last
    return {
        "rank": rank,
        "host": log.host,
        "process": log.process,
        "last_time": log.last_time,
        "is_silent": rank in flight.silent,
        "step": record and record.step,
        "doing": record and str(record.doing),
        "start": record and record.start,
        "end": record and record.end,
        "waiting_since": record and record.waiting_since,
        "waiting_for": str(record.waiting_for) if record and record.is_waiting else None,
        "waits_for_rank": flight.waits_for(rank),
    }
