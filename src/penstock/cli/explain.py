"""`penstock explain`: why a step takes its time, or why a run did not finish."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from penstock import view
from penstock.cli import inputs, options, reports, reviews
from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.files import flight
from penstock.sim.explain import explain
from penstock.sim.recorded.review import review
from penstock.sim.timeline import Timeline
from penstock.view import text
from penstock.view.sources import is_file, is_flight, read_recorded

if TYPE_CHECKING:
    from penstock.files.flight.timeline import RecordedStep
    from penstock.files.flight.waits import Flight

__all__ = ["explain_command"]

# With more lanes, a picture in the terminal is too tall to be useful.
_MAX_LANES = 64
# A recorded step is explained by simulating what its actions and messages took.
_ABOUT_SIMULATED = "Simulated with the usual seconds of each kind of action and message, "


@options.command("explain")
@options.schedule_argument("sources", several=True, metavar="SCHEDULE|RECORDS...")
@options.with_size
@options.with_costs
@options.LOWER
@options.HTML
@options.JSON
def explain_command(
    sources: tuple[str, ...],
    size: options.Size,
    costs: Costs | None,
    lowered: bool,
    html_file: Path | None,
    as_json: bool,
) -> None:
    """Say why a step takes as long as it does, or why a run did not finish.

    For a schedule: critical path, idle gaps, and which lower cost would help. For a recorded step
    also what its ranks waited for, and the compute that messages have slowed down. For a plan and
    its recorded step: what was predicted, and why the step took another time. For the flight
    records of a run, given as their folder or as some of its files: what every rank was doing,
    which rank it was waiting for, and the last step as far as it got.

    \b
    Examples:
      penstock explain 1F1B -r 4 -m 8 --transfer 0.5
      penstock explain mine.csv --costs costs.toml
      penstock explain recorded-step.json
      penstock explain plan.json recorded-step.json --html both.html
      penstock explain /tmp/penstock-flight-x1 --html last-step.html
    """
    if is_flight(sources[0]) or Path(sources[0]).is_dir():
        _explain_flights(reports.make_console(), sources, html_file, as_json=as_json)
        return
    if len(sources) == 2 and is_file(sources[1]):
        predicted = inputs.load_checked(sources[0], size, lowered=lowered).price(costs)
        _explain_difference(predicted, Path(sources[1]), html_file, as_json=as_json)
        return
    if len(sources) > 1:
        raise ArgumentError(
            "explain takes one schedule, or a plan and its recorded step "
            f"(got {', '.join(sources)})"
        )
    loaded = inputs.load_checked(sources[0], size, lowered=lowered)
    found = explain(loaded.schedule, loaded.choose_costs(costs))
    recorded = loaded.timeline if costs is None else None
    source: Timeline | view.Comparison = found.timeline
    if recorded is not None:
        source = view.Comparison({"recorded": recorded, "simulated": found.timeline})
    reports.write_views(source, html_file, ())
    if as_json:
        values = {} if recorded is None else reviews.recorded_values(recorded)
        click.echo(reports.to_json(reports.explanation(found) | values))
        return
    console = reports.make_console()
    if recorded is None:
        console.print(reports.explanation_view(found))
        return
    console.print(reviews.recorded_view(recorded))
    console.print()
    console.print(reports.explanation_view(found, _ABOUT_SIMULATED))


def _explain_difference(
    predicted: Timeline, step: Path, html_file: Path | None, *, as_json: bool
) -> None:
    """Hold a recorded step against its prediction."""
    recorded = read_recorded(step)
    found = review(predicted, recorded)
    timelines = {"predicted": predicted, "recorded": recorded}
    reports.write_views(view.Comparison(timelines), html_file, ())
    if as_json:
        click.echo(reports.to_json(reviews.review_values(found)))
    else:
        click.echo(reviews.review_text(found, recorded))


def _explain_flights(
    console: Console, sources: Sequence[str], html_file: Path | None, *, as_json: bool
) -> None:
    """Describe the ranks and the cause, and draw the last step as far as it got."""
    read = flight.read_flights(sources)
    step = flight.last_recorded_step(read)
    if step is not None:
        reports.write_views(view.Comparison({text.step_title(step): step.timeline}), html_file, ())
    if as_json:
        click.echo(reports.to_json(_values(read, step)))
        return
    console.print(text.flight_view(read))
    if step is None:
        console.print("\nthe records contain no compute action")
        return
    console.print(f"\n{text.step_title(step)}", markup=False)
    if read.num_ranks <= _MAX_LANES:
        console.print(view.draw(step.timeline))
    else:
        console.print(f"(too many ranks to draw here: {read.num_ranks}; use --html FILE)")


def _values(read: "Flight", step: "RecordedStep | None") -> dict[str, object]:
    """Return the content of flight records as plain values."""
    return {
        "schedule": read.schedule,
        "ranks": read.num_ranks,
        "missing": list(read.missing),
        "end": read.end,
        "last_step": None if step is None else step.step,
        "per_rank": [_rank_values(read, rank) for rank in read.logs],
        "causes": [
            {
                "reason": cause.reason.name.lower(),
                "ranks": list(cause.ranks),
                "waiting": list(cause.waiting),
            }
            for cause in read.causes
        ],
    }


def _rank_values(read: "Flight", rank: int) -> dict[str, object]:
    log = read.logs[rank]
    record = log.last
    return {
        "rank": rank,
        "host": log.host,
        "process": log.process,
        "last_time": log.last_time,
        "is_silent": rank in read.silent,
        "step": record and record.step,
        "doing": record and str(record.doing),
        "start": record and record.start,
        "end": record and record.end,
        "waiting_since": record and record.waiting_since,
        "waiting_for": str(record.waiting_for) if record and record.is_waiting else None,
        "waits_for_rank": read.waits_for(rank),
    }
