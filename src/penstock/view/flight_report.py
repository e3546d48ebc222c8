"""Flight records in words: where every rank was, and for whom all waited in the end."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.files.flight.log import FlightLog, Phase, spell_out
from penstock.files.flight.timeline import RecordedStep
from penstock.files.flight.waits import Cause, Flight, Reason
from penstock.ir.actions import Action, Kind

__all__ = ["flight_view", "list_ranks", "step_title", "tell_cause"]

# So many ranks have a line each; of more, those that matter most have.
_MOST_RANKS = 16
_MOST_CAUSES = 4
_MOST_UNFINISHED = 8
_ACTIONS_BEFORE = 4


def flight_view(flight: Flight) -> RenderableType:
    """Which records there are, where the ranks were, and who held them up, as text and a table."""
    shown = _most_telling(flight)
    parts: list[RenderableType] = [Text(_opening(flight)), Text(), _table(flight, shown)]
    if rest := len(flight.logs) - len(shown):
        parts.append(Text(f"… and {rest} more ranks"))
    parts.append(Text())
    causes = _shown_causes(flight)
    parts += [Text(tell_cause(flight, cause)) for cause in causes[:_MOST_CAUSES]]
    if rest := len(causes[_MOST_CAUSES:]):
        parts.append(Text(f"… and {rest} more such ranks"))
    return Group(*parts)


def step_title(step: RecordedStep) -> str:
    """What the picture of a step shows, with the actions that had not ended."""
    actions = [str(action) for action in step.unfinished[:_MOST_UNFINISHED]]
    if rest := len(step.unfinished) - len(actions):
        actions.append(f"{rest} more")
    unfinished = f"; not ended: {', '.join(actions)}" if actions else ""
    return f"{step.timeline.schedule.name}, as recorded{unfinished}"


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, neighbours as ranges.

    >>> list_ranks([3]), list_ranks([0, 1]), list_ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0, 1', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(texts)}"


def tell_cause(flight: Flight, cause: Cause) -> str:
    """Why ranks did not go on, and who waited for them in the end, as sentences."""
    told = _tell(flight, cause)
    if not cause.waiting or cause.reason in (Reason.CYCLE, Reason.MEETING):
        return f"{told}."
    what = "that" if cause.reason is Reason.LINK else "it"
    return f"{told}; {list_ranks(cause.waiting)} waited for {what} in the end."


def _tell(flight: Flight, cause: Cause) -> str:
    rank = cause.ranks[-1]
    match cause.reason:
        case Reason.SILENT:
            log = flight.logs[rank]
            return (
                f"{_name(log)} fell silent {_ago(flight, log.last_time)} before the end, "
                f"{_place(flight, log)}"
            )
        case Reason.MISSING:
            return f"rank {rank} left no record here, for it ran elsewhere or ended well"
        case Reason.BUSY:
            log = flight.logs[rank]
            return f"{_name(log)} waited for nobody, {_place(flight, log)}"
        case Reason.OUTSIDE:
            log = flight.logs[rank]
            return f"{_name(log)} was not in the pipeline, {_place(flight, log)}"
        case Reason.LINK:
            sent = flight.sent_at(rank)
            assert sent is not None, "a link is a cause where something was sent"
            return (
                f"what rank {rank} waits for, {_awaited(flight.logs[rank])}, was sent by rank "
                f"{cause.ranks[0]} {_ago(flight, sent)} before the end and did not arrive"
            )
        case Reason.CYCLE:
            ranks = " > ".join(map(str, (*cause.ranks, cause.ranks[0])))
            also = f"; {list_ranks(cause.waiting)} waited for them" if cause.waiting else ""
            return f"the ranks {ranks} waited for one another{also}"
        case Reason.MEETING:
            return f"all ranks had come to {_doing(flight.logs[rank])}, which did not end"


def _opening(flight: Flight) -> str:
    moment = datetime.fromtimestamp(flight.end, UTC).strftime("%Y-%m-%d %H:%M:%S")
    found = f"{flight.schedule} on {flight.num_ranks} ranks, with the records of "
    found += "all" if not flight.missing else f"{len(flight.logs)}"
    if flight.missing:
        found += f" (none of {list_ranks(flight.missing)})"
    return f"{found}. They end at {moment} UTC; seconds count back from there."


def _most_telling(flight: Flight) -> list[int]:
    """The ranks to show: all of them, or those at the end of the chains and those before."""
    ranks = list(flight.logs)
    if len(ranks) <= _MOST_RANKS:
        return ranks
    ends = {rank for cause in _shown_causes(flight) for rank in cause.ranks}
    ranks.sort(key=lambda rank: (rank not in ends, flight.waits_for(rank) not in ends, rank))
    return sorted(ranks[:_MOST_RANKS])


def _shown_causes(flight: Flight) -> list[Cause]:
    """The causes for which anybody waited, and ranks that fell silent; all if there are none."""
    found = [c for c in flight.causes if c.waiting or c.reason in (Reason.SILENT, Reason.CYCLE)]
    return found or list(flight.causes)


def _table(flight: Flight, ranks: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "was in", "of step"):
        table.add_column(heading, no_wrap=True)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("waiting for", no_wrap=True)
    table.add_column("before that", no_wrap=True)
    for rank in ranks:
        table.add_row(str(rank), *_cells(flight, flight.logs[rank]))
    return table


def _cells(flight: Flight, log: FlightLog) -> list[str]:
    record = log.last
    silent = f"silent for {_ago(flight, log.last_time)}" if log.rank in flight.silent else ""
    if record is None:
        return ["nothing yet", "", _ago(flight, log.began), silent, ""]
    before = [str(r.doing) for r in log.of_step(record.step)[:-1] if _is_work(r.doing)]
    if record.end is not None:
        before += [str(record.doing)] * _is_work(record.doing)
        return ["nothing", str(record.step), _ago(flight, record.end), silent, _tail(before)]
    doing = _short(record.doing)
    awaited = silent or _awaited(log)
    if not awaited and (peer := flight.waits_for(log.rank)) is not None:
        awaited = f"rank {peer}"
    return [doing, str(record.step), _ago(flight, record.start), awaited, _tail(before)]


def _tail(actions: Sequence[str]) -> str:
    return " ".join(actions[-_ACTIONS_BEFORE:])


def _is_work(doing: Action | Phase) -> bool:
    return isinstance(doing, Action) and not doing.kind.is_communication


def _short(doing: Action | Phase) -> str:
    return str(doing) if isinstance(doing, Action) else doing.name.lower()


def _awaited(log: FlightLog) -> str:
    """The message that a rank waits for, and the rank at its other end."""
    record = log.last
    if record is None or not record.is_waiting or record.waiting_for is None:
        return ""
    message = record.waiting_for
    word = "to" if message.kind in (Kind.SEND_F, Kind.SEND_B) else "from"
    return f"{message} {word} rank {log.placement.rank_of_stage[message.peer or 0]}"


def _name(log: FlightLog) -> str:
    return f"rank {log.rank} (process {log.process} on {log.host})"


def _doing(log: FlightLog) -> str:
    record = log.last
    return "" if record is None else spell_out(record.doing)


def _place(flight: Flight, log: FlightLog) -> str:
    record = log.last
    if record is None:
        return "and had begun nothing yet"
    if record.end is None:
        return f"in {_doing(log)} of step {record.step} since {_ago(flight, record.start)}"
    ended = _ago(flight, record.end)
    return f"after {_doing(log)} of step {record.step}, which ended {ended} before the end"


def _ago(flight: Flight, moment: float) -> str:
    seconds = max(flight.end - moment, 0.0)
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
