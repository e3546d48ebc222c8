"""One schedule on its ranks: the transport between them, their guard, and its programs.

Before a step sends anything, all ranks have said what they were given, and it ends when all have
said how it went; whatever fails on one rank is raised by all. A rank that was given the same form
as in its last step runs its first forwards meanwhile, so nobody waits for that in most steps:

    rank 0    say | 0F0 | hear | send 0F0 | ...
    rank 1    say | hear       | receive 0F0 | ...
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from math import inf

import torch

from penstock.alive.guard import Guard, NoGuard
from penstock.alive.guard_opening import open_guard
from penstock.alive.progress_log import AGREEMENT, FLUSH, OUTCOME, Note
from penstock.alive.timeouts import Timeouts
from penstock.dropin.names.actions import _get_profiler_function_name, from_work
from penstock.dropin.run.lowered import Lowered
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.meshes import PipeliningMetadataError
from penstock.errors import PipelineError
from penstock.ir.actions import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.loss.weigher import KnownWeights
from penstock.ranks.agreement import agree
from penstock.ranks.control import Control, GroupControl, LocalControl, cannot
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


class _Refused(BaseException):
    """Ends a step of this rank at once, without a message to other ranks."""

    def __init__(self, error: PipelineError | PipeliningMetadataError) -> None:
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
        # The form of what this rank was given last, and what waits for that of all others.
        self._digest = b""
        self._wait_for_all: Callable[[], list[bytes]] | None = None
        self._is_alone = isinstance(transport, LocalTransport)
        self._has_met = False
        self._is_refusing = False

    @contextmanager
    def call(self, *, is_guarded: bool) -> Iterator[None]:
        """Be around a step: if it fails on one rank all raise, and say where it failed.

        A step that is not guarded meets nobody: a rank may run it alone, and be refused.
        """
        self._has_met, self._is_refusing = False, not is_guarded
        guarded: AbstractContextManager[None] = self.guard.call() if is_guarded else nullcontext()
        with guarded:
            failure: StepFailedError | None = None
            try:
                yield
            except LinkLostError:
                self.transport.forget_shapes()
                raise
            except _Refused as refused:
                raise refused.error from None
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
        """Say what this rank was given; hear the same of all others now, or when it settles."""
        self.guard.log.begin_step()
        if self._is_refusing:
            # Nothing has changed, and ranks that insist on that exchange nothing.
            self.transport.begin_step(self._signature)
        elif self._is_alone:
            self.rows = rows
            self.transport.begin_step(b"")
        else:
            digest = blake2b(text.encode(), digest_size=16).digest()
            is_as_before, self._digest = digest == self._digest, digest
            self._say(digest, rows, has_failed=False)
            self.transport.begin_step(self._signature)
            if not is_as_before:
                self.settle()
        self._has_met = True

    def settle(self, during: Action | None = None) -> None:
        """Hear what all ranks were given, before this one sends, receives or gives up.

        The shapes of the step are those of the last one unless some rank was given another form.
        """
        if self._wait_for_all is None:
            return
        log = self.guard.log
        log.start(AGREEMENT)
        records = self._hear()
        log.end()
        if any(has_failed for *_, has_failed in records):
            messages = self._control.gather(None)
            rank, message = next((r, m) for r, m in enumerate(messages) if m is not None)
            raise _Refused(PipelineError(f"rank {rank} cannot begin the step: {message}"))
        self.rows = max((count for _, count, _ in records if count >= 0), default=None)
        signature = blake2b(b"".join(one for one, *_ in records)).digest()
        if signature != self._signature:
            self._signature = signature
            self.transport.begin_step(signature)
        if during is not None:
            log.start(Note.of(during))

    def refuse(self, error: PipeliningMetadataError) -> None:
        """End the step here at once, if this rank may be the only one in it."""
        if self._is_refusing:
            raise _Refused(error)

    def _say(self, digest: bytes, rows: int | None, *, has_failed: bool) -> None:
        record = _RECORD.pack(digest, _NO_ROWS if rows is None else rows, has_failed)
        self._wait_for_all = self._control.start_gathering(record)

    def _hear(self) -> list[tuple[bytes, int, bool]]:
        assert self._wait_for_all is not None, "this rank has said what it was given"
        wait, self._wait_for_all = self._wait_for_all, None
        return [_RECORD.unpack(data) for data in wait()]

    def _tell_failure(self, error: Exception) -> None:
        """Let the others raise what keeps this rank from the step."""
        if self._is_alone or self._is_refusing:
            return
        self._say(bytes(16), None, has_failed=True)
        self._hear()
        self._control.gather(f"{type(error).__name__}: {error}")

    def _conclude(self, failure: StepFailedError | None) -> None:
        self.settle()
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
    prepare: Callable[[], Lowered], stage: _PipelineStageBase, timeouts: Timeouts
) -> tuple[Lowered, Session]:
    """Connect the ranks of a schedule; every rank calls this, and `prepare` returns the schedule.

    If that fails on one rank, all ranks raise.
    """
    if stage.group_size == 1:
        lowered = prepare()
        return lowered, Session(LocalTransport(1), NoGuard(), lowered.training)
    group = stage.group or get_default_group()
    control = GroupControl(group)
    with control.together(cannot("prepare its schedule")):
        lowered = prepare()
    schedule = lowered.training
    agree(control, [*version_facts(), schedule_fact(schedule)])
    ahead = SENDS_AHEAD if lowered.sends_may_wait else inf
    device = torch.device(stage.device)
    transport = GroupTransport(group, device, control=control, sends_ahead=ahead)
    transport.open_channels(messages_in_flight(schedule))
    return lowered, Session(transport, open_guard(transport, schedule, timeouts), schedule)


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
