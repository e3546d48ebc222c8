"""Flight records as text: what every rank was doing, and which rank the others waited for."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.files.flight.log import FlightLog, Phase, spell_out
from penstock.files.flight.timeline import RecordedStep
from penstock.files.flight.waits import Cause, Flight, Reason
from penstock.ir.actions import Action, Kind

__all__ = ["flight_view", "step_title"]

# Beyond these limits, only the most informative ones are listed.
_MAX_RANKS = 16
_MAX_CAUSES = 4
_MAX_UNFINISHED = 8
_ACTIONS_BEFORE = 4


def flight_view(flight: Flight) -> RenderableType:
    """Summarise flight records: the records found, a table of the ranks, and the cause."""
    shown = _most_informative(flight)
    parts: list[RenderableType] = [Text(_opening(flight)), Text(), _table(flight, shown)]
    if rest := len(flight.logs) - len(shown):
        parts.append(Text(f"… and {rest} more ranks"))
    parts.append(Text())
    causes = _shown_causes(flight)
    parts += [Text(_describe_cause(flight, cause)) for cause in causes[:_MAX_CAUSES]]
    if rest := len(causes[_MAX_CAUSES:]):
        parts.append(Text(f"… and {rest} more causes"))
    return Group(*parts)


def step_title(step: RecordedStep) -> str:
    """Return the title of a recorded step, with the actions that did not finish."""
    actions = [str(action) for action in step.unfinished[:_MAX_UNFINISHED]]
    if rest := len(step.unfinished) - len(actions):
        actions.append(f"{rest} more")
    unfinished = f"; unfinished: {', '.join(actions)}" if actions else ""
    return f"{step.timeline.schedule.name}, as recorded{unfinished}"


def _list_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, with three or more neighbours as a range.

    >>> _list_ranks([3]), _list_ranks([0, 1]), _list_ranks([0, 1, 2, 5])
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


def _describe_cause(flight: Flight, cause: Cause) -> str:
    """Say why ranks stopped, and which ranks were waiting for them."""
    reason = _describe_reason(flight, cause)
    if not cause.waiting or cause.reason in (Reason.CYCLE, Reason.MEETING):
        return f"{reason}."
    what = "that message" if cause.reason is Reason.LINK else "it"
    verb = "were" if len(cause.waiting) > 1 else "was"
    return f"{reason}; {_list_ranks(cause.waiting)} {verb} waiting for {what}."


def _describe_reason(flight: Flight, cause: Cause) -> str:
    rank = cause.ranks[-1]
    match cause.reason:
        case Reason.SILENT:
            log = flight.logs[rank]
            return (
                f"{_name(log)} went silent {_ago(flight, log.last_time)} before the end, "
                f"{_last_activity(flight, log)}"
            )
        case Reason.MISSING:
            return f"rank {rank} left no record here: it ran elsewhere or finished normally"
        case Reason.BUSY:
            log = flight.logs[rank]
            return f"{_name(log)} was not waiting for any rank, {_last_activity(flight, log)}"
        case Reason.OUTSIDE:
            log = flight.logs[rank]
            return f"{_name(log)} was outside the pipeline, {_last_activity(flight, log)}"
        case Reason.LINK:
            sent = flight.sent_at(rank)
            assert sent is not None, "a link is a cause only if a message was sent"
            return (
                f"rank {rank} is waiting for {_awaited(flight.logs[rank])}, which was sent "
                f"{_ago(flight, sent)} before the end and did not arrive"
            )
        case Reason.CYCLE:
            ranks = " > ".join(map(str, (*cause.ranks, cause.ranks[0])))
            also = f"; {_list_ranks(cause.waiting)} waited for them" if cause.waiting else ""
            return f"deadlock: ranks {ranks} waited for each other{also}"
        case Reason.MEETING:
            return f"all ranks had reached {_doing(flight.logs[rank])}, which did not finish"


def _opening(flight: Flight) -> str:
    moment = datetime.fromtimestamp(flight.end, UTC).strftime("%Y-%m-%d %H:%M:%S")
    found = f"{flight.schedule} on {flight.num_ranks} ranks, with records of "
    if flight.missing:
        found += f"{len(flight.logs)} of them (missing: {_list_ranks(flight.missing)})"
    else:
        found += "all ranks"
    return f"{found}. The records end at {moment} UTC; times count back from then."


def _most_informative(flight: Flight) -> list[int]:
    """Choose the ranks to list: all, or those at the end of the waits and their neighbours."""
    ranks = list(flight.logs)
    if len(ranks) <= _MAX_RANKS:
        return ranks
    ends = {rank for cause in _shown_causes(flight) for rank in cause.ranks}
    ranks.sort(key=lambda rank: (rank not in ends, flight.waits_for(rank) not in ends, rank))
    return sorted(ranks[:_MAX_RANKS])


def _shown_causes(flight: Flight) -> list[Cause]:
    """Return the causes that ranks waited for, and silent ranks; all causes if none are left."""
    found = [c for c in flight.causes if c.waiting or c.reason in (Reason.SILENT, Reason.CYCLE)]
    return found or list(flight.causes)


def _table(flight: Flight, ranks: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "action", "step"):
        table.add_column(heading, no_wrap=True)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("waiting for", no_wrap=True)
    table.add_column("previous actions", no_wrap=True)
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
    """Name the message that a rank is waiting for, and the rank at its other end."""
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


def _last_activity(flight: Flight, log: FlightLog) -> str:
    """Say what a rank was doing, or had last done."""
    record = log.last
    if record is None:
        return "before its first action"
    if record.end is None:
        began = _ago(flight, record.start)
        return f"in {_doing(log)} of step {record.step}, which began {began} before the end"
    ended = _ago(flight, record.end)
    return f"after {_doing(log)} of step {record.step}, which ended {ended} before the end"


def _ago(flight: Flight, moment: float) -> str:
    seconds = max(flight.end - moment, 0.0)
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
