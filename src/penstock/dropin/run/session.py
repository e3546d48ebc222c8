"""One schedule on its ranks: the transport between them, who watches them, and its programs.

A step begins when all ranks have said what they were given, and ends when all have said how it
went. Between the two the executor runs; whatever fails on one rank is raised by all.
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from math import inf

import torch

from penstock.alive.guard import Guard, NoGuard
from penstock.alive.guard_opening import open_guard
from penstock.alive.progress_log import AGREEMENT, FLUSH, OUTCOME
from penstock.alive.timeouts import Timeouts
from penstock.dropin.names.actions import _get_profiler_function_name, from_work
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.metadata import PipeliningMetadataError
from penstock.errors import PipelineError
from penstock.ir.actions import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.loss.weigher import KnownWeights
from penstock.ranks.agreement import agree
from penstock.ranks.control import Control, LocalControl
from penstock.ranks.faults import LinkLostError, StepFailedError
from penstock.ranks.group_transport import SENDS_AHEAD, GroupTransport
from penstock.ranks.transport import LocalTransport
from penstock.sim.in_flight import messages_in_flight
from penstock.step.executor import Executor
from penstock.step.step_data import Around, Microbatches, Results
from penstock.torch_private import get_default_group, profiler_enabled
from penstock.training.build.rank_facts import schedule_fact, version_facts
from penstock.training.outcome import gather_outcome, raise_first_fault

__all__ = ["Program", "Session", "make_program", "open_session"]

# What a rank says before a step: the form of what it was given, its rows, and if it has failed.
_RECORD = struct.Struct("!16sq?")
_NO_ROWS = -1
# What stages of ours would take from the executor; those here take it from their schedule.
_NOTHING = Microbatches((), {}, (), KnownWeights(()), ())


class _NotBegunError(PipelineError):
    """Another rank has said that it cannot begin the step."""


class _Refused(BaseException):
    """Ends a step of this rank at once, without a message to other ranks."""

    def __init__(self, error: PipeliningMetadataError) -> None:
        self.error = error


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule of this rank, bound to what its actions do."""

    schedule: Schedule
    executor: Executor
    overlaps: Mapping[Action, tuple[Action, ...]]

    def run(self) -> None:
        """Run every action once; under a profiler each is visible under torch's name for it."""
        if profiler_enabled():
            self.executor.profile(_NOTHING, Results(), _name_for_profile)
        else:
            self.executor.run(_NOTHING, Results())


def _name_for_profile(action: Action) -> str:
    if action.kind.is_communication:
        return f"PP:{action}"
    return _get_profiler_function_name(from_work(action))


class Session:
    """The ranks of one schedule; open until its owner is let go of."""

    def __init__(
        self, transport: LocalTransport | GroupTransport, guard: Guard, schedule: Schedule
    ) -> None:
        self.transport = transport
        self.guard = guard
        self.schedule = schedule
        self._control: Control = (
            LocalControl() if isinstance(transport, LocalTransport) else transport.control
        )
        self.rank = transport.ranks[0]
        # How many rows the batch of the present step has, if the first stage knows.
        self.rows: int | None = None
        self._signature = b""
        self._is_alone = isinstance(transport, LocalTransport)
        self._has_met = False
        self._is_refusing = False

    @property
    def knows_shapes(self) -> bool:
        """Whether the shapes of the present step were known before it began."""
        transport = self.transport
        return isinstance(transport, LocalTransport) or transport.knows_shapes

    @contextmanager
    def call(self, *, is_watched: bool) -> Iterator[None]:
        """Be around a step: if it fails on one rank all raise, and say where it failed.

        A step that is not watched meets nobody: a rank may run it alone, and be refused.
        """
        self._has_met, self._is_refusing = False, not is_watched
        guarded: AbstractContextManager[None] = self.guard.call() if is_watched else nullcontext()
        with guarded:
            failure: StepFailedError | None = None
            try:
                yield
            except LinkLostError:
                self.transport.forget_shapes()
                raise
            except _Refused as refused:
                raise refused.error from None
            except _NotBegunError:
                raise
            except StepFailedError as error:
                failure = error
            except Exception as error:
                if not self._has_met:
                    self._tell_failure(error)
                    raise
                failure = StepFailedError(f"rank {self.rank}", error)
                failure.__cause__ = error
            if self._has_met:
                self._conclude(failure)

    def meet(self, text: str, rows: int | None) -> None:
        """Say what this rank was given, and hear the same of all others."""
        self.guard.log.begin_step()
        if self._is_refusing:
            # Nothing has changed, and ranks that insist on that exchange nothing.
            self.transport.begin_step(self._signature)
        elif self._is_alone:
            self.rows = rows
            self.transport.begin_step(b"")
        else:
            self.guard.log.start(AGREEMENT)
            digest = blake2b(text.encode(), digest_size=16).digest()
            records = self._gather(digest, rows, has_failed=False)
            self.rows = max((count for _, count, _ in records if count >= 0), default=None)
            self._signature = blake2b(b"".join(one for one, *_ in records)).digest()
            self.transport.begin_step(self._signature)
            self.guard.log.end()
        self._has_met = True

    def refuse(self, error: PipeliningMetadataError) -> None:
        """End the step here at once, if this rank may be the only one in it."""
        if self._is_refusing:
            raise _Refused(error)

    def _gather(
        self, digest: bytes, rows: int | None, *, has_failed: bool
    ) -> list[tuple[bytes, int, bool]]:
        record = _RECORD.pack(digest, _NO_ROWS if rows is None else rows, has_failed)
        records = [_RECORD.unpack(data) for data in self._control.gather_bytes(record)]
        if any(failed for _, _, failed in records) and not has_failed:
            messages = self._control.gather(None)
            rank, message = next((r, m) for r, m in enumerate(messages) if m is not None)
            raise _NotBegunError(f"rank {rank} cannot begin the step: {message}")
        return records

    def _tell_failure(self, error: Exception) -> None:
        """Let the others raise what keeps this rank from the step."""
        if self._is_alone or self._is_refusing:
            return
        self._gather(bytes(16), None, has_failed=True)
        self._control.gather(f"{type(error).__name__}: {error}")

    def _conclude(self, failure: StepFailedError | None) -> None:
        log = self.guard.log
        log.start(FLUSH)
        self.transport.end_step()
        log.end()
        if self._is_alone:
            if failure is not None:
                raise failure
            return
        log.start(OUTCOME)
        if gather_outcome(self._control, (), failure).has_failed:
            self.transport.forget_shapes()
            raise_first_fault(self._control, failure)
        self.transport.remember_shapes()
        log.end()


def open_session(
    schedule: Schedule, stage: _PipelineStageBase, timeouts: Timeouts, *, sends_may_wait: bool
) -> Session:
    """Connect the ranks of a schedule; every rank calls this."""
    if stage.group_size == 1:
        return Session(LocalTransport(1), NoGuard(), schedule)
    group = stage.group or get_default_group()
    ahead = SENDS_AHEAD if sends_may_wait else inf
    transport = GroupTransport(group, torch.device(stage.device), sends_ahead=ahead)
    agree(transport.control, [*version_facts(), schedule_fact(schedule)])
    transport.open_channels(messages_in_flight(schedule))
    return Session(transport, open_guard(transport, schedule, timeouts), schedule)


def make_program(
    session: Session,
    schedule: Schedule,
    stages: Mapping[int, _PipelineStageBase],
    perform: Around,
) -> Program:
    """Bind this rank's rows of a schedule to what `perform` does for each action."""
    rank, rows = session.rank, schedule.rows
    here = range(int(rows.first[rank]), int(rows.first[rank + 1]))
    executor = Executor(
        schedule,
        here,
        {index: stage.runtime for index, stage in stages.items()},
        session.transport,
        loss=None,
        around=dict.fromkeys(Kind, perform),
        log=session.guard.log,
    )
    return Program(schedule, executor, _find_overlaps(schedule, here))


def _find_overlaps(schedule: Schedule, here: range) -> dict[Action, tuple[Action, ...]]:
    """Return, for every action that is run together with others, all of them in order."""
    found: dict[Action, tuple[Action, ...]] = {}
    group: list[Action] = []
    joined = schedule.rows.joined[here.start : here.stop].tolist()
    for row, is_joined in zip(here, joined, strict=True):
        action = schedule.rows.action(row)
        group = [*group, action] if is_joined else [action]
        if len(group) > 1:
            found.update(dict.fromkeys(group, tuple(group)))
    return found
