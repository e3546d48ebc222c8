"""The flight records of all ranks together: which rank each waited for, and the root cause.

    rank 0  0B2 waits for the gradient of 1B2  ->  rank 1
    rank 1  1B2 waits for the gradient of 2B2  ->  rank 2
    rank 2  2B2, and no sign of life since     ->  the rank that all waited for

A rank that fell silent ends such a chain even if it waited itself, because its wait ended with it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from pathlib import Path

from penstock.errors import ArgumentError, ParseError
from penstock.files.flight.log import FlightLog, FlightRecord, Phase
from penstock.files.flight.record_file import read_flight
from penstock.ir.actions import Action, Kind
from penstock.ir.placement import Placement

__all__ = ["Cause", "Flight", "Reason", "read_flights"]

# Processes give a sign of life twice a second.
_SILENT_SECONDS = 5.0
_SEND_OF = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}
# The order of phases within a step; a phase that has ended counts one more.
_ORDER = {Phase.AGREEMENT: 0, Phase.FLUSH: 3, Phase.OUTCOME: 5}
_ACTIONS, _PER_STEP = 2, 7


class Reason(Enum):
    """Why the ranks at the end of a chain of waits made no progress."""

    SILENT = auto()
    MISSING = auto()
    BUSY = auto()
    OUTSIDE = auto()
    LINK = auto()
    CYCLE = auto()
    MEETING = auto()


@dataclass(frozen=True, slots=True)
class Cause:
    """The end of chains of waits: why, on which ranks, and which ranks waited for them.

    A link goes from the first of two ranks to the second; in a cycle each waits for the next.
    """

    reason: Reason
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]


@dataclass(frozen=True)
class Flight:
    """The flight records of a pipeline's ranks, as far as they were found."""

    placement: Placement
    schedule: str
    logs: Mapping[int, FlightLog]

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return self.placement.num_ranks

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks without a record."""
        return tuple(rank for rank in range(self.num_ranks) if rank not in self.logs)

    @cached_property
    def end(self) -> float:
        """When any of the processes last wrote anything, in seconds of the wall clock."""
        return max(log.last_time for log in self.logs.values())

    @cached_property
    def silent(self) -> frozenset[int]:
        """The ranks that stopped writing before the others did, without closing their records."""
        is_closed = any(log.closed is not None for log in self.logs.values())
        return frozenset(
            rank
            for rank, log in self.logs.items()
            if log.closed is None
            and (is_closed or (log.heard and self.end - log.last_time > _SILENT_SECONDS))
        )

    def waits_for(self, rank: int) -> int | None:
        """Return the rank for which a rank waited when its record ended, if it waited."""
        return self._awaited.get(rank)

    def sent_at(self, rank: int) -> float | None:
        """Return when the message that a rank waits for was sent, if its sender noted that."""
        return self._sent.get(rank)

    @cached_property
    def _awaited(self) -> dict[int, int]:
        awaited: dict[int, int] = {}
        meetings: dict[int, int | None] = {}
        for rank, log in self.logs.items():
            record = log.last
            if record is None or record.end is not None:
                continue
            if record.is_waiting and record.waiting_for is not None:
                awaited[rank] = self.placement.rank_of_stage[record.waiting_for.peer or 0]
            elif isinstance(record.doing, Phase) and record.doing.is_meeting:
                meeting = _position(record)
                if meeting not in meetings:
                    meetings[meeting] = self._last_to_come(meeting)
                if (last := meetings[meeting]) is not None:
                    awaited[rank] = last
        return awaited

    @cached_property
    def _sent(self) -> dict[int, float]:
        sent = {}
        for rank, sender in self._awaited.items():
            record = self.logs[rank].last
            if sender in self.logs and record is not None and record.waiting_for is not None:
                moment = _sent_at(self.logs[sender], record.waiting_for, record.step)
                if record.is_waiting and moment is not None:
                    sent[rank] = moment
        return sent

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """The ends of all chains of waits, those for which most ranks waited first."""
        waiting: dict[tuple[Reason, tuple[int, ...]], list[int]] = {}
        for rank in self.logs:
            reason, ranks = self._end_of_chain(rank)
            held_up = waiting.setdefault((reason, ranks), [])
            if rank not in ranks or reason is Reason.LINK:
                held_up.append(rank)
        causes = [Cause(*end, tuple(ranks)) for end, ranks in waiting.items()]
        return tuple(sorted(causes, key=lambda cause: -len(cause.waiting)))

    def chain(self, rank: int) -> tuple[int, ...]:
        """Return a rank, the one that it waited for, and so on, as far as they are known."""
        path = {rank: None}
        while rank in self.logs and rank not in self.silent:
            awaited = self.waits_for(rank)
            if awaited is None or awaited in path:
                break
            path[awaited] = None
            rank = awaited
        return tuple(path)

    def _end_of_chain(self, rank: int) -> tuple[Reason, tuple[int, ...]]:
        path = self.chain(rank)
        last = path[-1]
        for receiver in path:
            sender = self.waits_for(receiver)
            if self.sent_at(receiver) is not None and not {sender, receiver} & self.silent:
                assert sender is not None, "somebody sent it"
                return Reason.LINK, (sender, receiver)
        if last not in self.logs:
            return Reason.MISSING, (last,)
        if last in self.silent:
            return Reason.SILENT, (last,)
        awaited = self.waits_for(last)
        if awaited is not None:
            cycle = path[path.index(awaited) :]
            first = cycle.index(min(cycle))
            return Reason.CYCLE, cycle[first:] + cycle[:first]
        record = self.logs[last].last
        if record is None or record.end is not None:
            return Reason.OUTSIDE, (last,)
        if isinstance(record.doing, Phase) and record.doing.is_meeting:
            return Reason.MEETING, tuple(self.logs)
        return Reason.BUSY, (last,)

    def _last_to_come(self, meeting: int) -> int | None:
        """Return the rank furthest from a meeting, preferring one that is silent or busy."""
        behind = [rank for rank in self.logs if _position(self.logs[rank].last) < meeting]
        if not behind:
            return self.missing[0] if self.missing else None
        return min(behind, key=self._distance)

    def _distance(self, rank: int) -> tuple[bool, int, bool, int]:
        record = self.logs[rank].last
        waits = record is not None and record.is_waiting
        return rank not in self.silent, _position(record), waits, rank


def _position(record: FlightRecord | None) -> int:
    """Return a rank's progress as a number that grows with every part of every step."""
    if record is None:
        return 0
    if not isinstance(record.doing, Phase):
        return 1 + record.step * _PER_STEP + _ACTIONS
    return 1 + record.step * _PER_STEP + _ORDER[record.doing] + (record.end is not None)


def _sent_at(sender: FlightLog, receive: Action, step: int) -> float | None:
    """Return when a rank began to send what another receives."""
    if receive.kind not in _SEND_OF:
        return None
    send = (_SEND_OF[receive.kind], receive.peer, receive.microbatch, receive.stage)
    is_send = sender.table["step"] == step
    for name, number in zip(("kind", "stage", "microbatch", "peer"), send, strict=True):
        is_send = is_send & (sender.table["doing"][name] == number)
    found = sender.table["start"][is_send]
    return float(found[-1]) + sender.clock_offset if len(found) else None


def read_flights(paths: Iterable[Path | str]) -> Flight:
    """Read the flight records of one pipeline: a folder of them, or some of its files."""
    files = [file for path in paths for file in _files(Path(path))]
    logs: dict[int, FlightLog] = {}
    for log in map(read_flight, files):
        first = next(iter(logs.values()), log)
        if (log.placement, log.schedule) != (first.placement, first.schedule):
            raise ParseError(f"{log.path} and {first.path} are of different pipelines")
        if log.rank in logs:
            raise ParseError(f"{log.path} and {logs[log.rank].path} are both of rank {log.rank}")
        logs[log.rank] = log
    first = next(iter(logs.values()))
    return Flight(first.placement, first.schedule, dict(sorted(logs.items())))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.flight"))
    if not files:
        raise ArgumentError(
            f"{path} must have flight records, files that end with .flight (got none)"
        )
    return files
