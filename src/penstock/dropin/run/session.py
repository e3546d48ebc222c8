"""One schedule on its ranks: the transport between them, their guard, and its programs.

A step begins when all ranks have said what they were given, and ends when all have said how it
went. Between the two the executor runs; whatever fails on one rank is raised by all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import inf

import torch

from penstock.alive.guard import Guard, NoGuard
from penstock.alive.guard_opening import opening_guard
from penstock.alive.progress_log import AGREEMENT, FLUSH, OUTCOME
from penstock.alive.timeouts import Timeouts
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.metadata import PipeliningMetadataError
from penstock.errors import PipelineError, SizeError
from penstock.ir.actions import Kind, Overlap
from penstock.ir.schedule import Schedule
from penstock.parallel.groups import groups_beside
from penstock.ranks.agreement import agree
from penstock.ranks.control import Control, GroupControl, LocalControl, cannot
from penstock.ranks.faults import LinkLostError, StepFailedError
from penstock.ranks.group_transport import SENDS_AHEAD, GroupTransport
from penstock.ranks.transport import LocalTransport
from penstock.sim.in_flight import messages_in_flight
from penstock.torch_private import get_default_group
from penstock.training.build.rank_facts import schedule_fact, version_facts
from penstock.training.steps.outcome import gather_outcome, raise_first_fault

__all__ = ["Lowered", "Session", "open_session"]


@dataclass(frozen=True, eq=False)
class Lowered:
    """What all ranks run, and whether a send may wait for its receive."""

    training: Schedule
    sends_may_wait: bool

    @cached_property
    def evaluation(self) -> Schedule:
        """The same without gradients on their way; stages know that they have no backwards."""
        rows = self.training.rows
        return replace(self.training, rows=rows.keep(~rows.is_kind(Kind.SEND_B, Kind.RECV_B)))


class _NotBegunError(PipelineError):
    """Another rank has said that it cannot begin the step."""


class _Refused(BaseException):
    """Ends a step of this rank at once, without a message to other ranks."""


class Session:
    """The ranks of one schedule; open until its owner is let go of."""

    def __init__(
        self,
        transport: LocalTransport | GroupTransport,
        control: Control,
        guard: Guard,
        lowered: Lowered,
    ) -> None:
        self.transport, self.guard, self.lowered = transport, guard, lowered
        self._control, self.rank = control, transport.ranks[0]
        works = lowered.training.rows.works(self.rank)
        overlaps = [work for work in works if isinstance(work, Overlap)]
        # For every action of this rank that is run together with others, all of them.
        self.overlaps = {action: overlap for overlap in overlaps for action in overlap.actions}
        # How many rows the batch of the present step has, if the first stage knows.
        self.rows: int | None = None
        self._signature = b""
        self._has_met = False
        self._is_refusing = False

    @contextmanager
    def call(self, *, is_guarded: bool) -> Iterator[None]:
        """Be around a step; one that is not guarded meets nobody, so a rank may run it alone."""
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
                raise refused.args[0] from None
            except _NotBegunError:
                raise
            except StepFailedError as error:
                failure = error
            except Exception as error:
                if not self._has_met:
                    if is_guarded:
                        self._exchange("", None, f"{type(error).__name__}: {error}")
                    raise
                failure = StepFailedError(f"rank {self.rank}", error)
                failure.__cause__ = error
            if self._has_met:
                self._conclude(failure)

    def meet(self, form: str, rows: int | None) -> None:
        """Say what this rank was given, and hear the same of all others."""
        log = self.guard.log
        log.begin_step()
        # Where nothing has changed, ranks that insist on that exchange nothing.
        if not self._is_refusing:
            log.start(AGREEMENT)
            digests, counts, errors = zip(*self._exchange(form, rows, None), strict=True)
            for rank, error in enumerate(errors):
                if error is not None:
                    raise _NotBegunError(f"rank {rank} cannot begin the step: {error}")
            self.rows = max((count for count in counts if count is not None), default=None)
            self._signature = "".join(digests).encode()
            log.end()
        self.transport.begin_step(self._signature)
        self._has_met = True

    def refuse(self, error: PipeliningMetadataError) -> None:
        """End the step here at once, if this rank may be the only one in it."""
        if self._is_refusing:
            raise _Refused(error)

    def _exchange(
        self, form: str, rows: int | None, error: str | None
    ) -> list[tuple[str, int | None, str | None]]:
        digest = blake2b(form.encode(), digest_size=16).hexdigest()
        return self._control.gather([digest, rows, error])

    def _conclude(self, failure: StepFailedError | None) -> None:
        log = self.guard.log
        log.start(FLUSH)
        self.transport.end_step()
        log.end()
        log.start(OUTCOME)
        if gather_outcome(self._control, (), failure).has_failed:
            self.transport.forget_shapes()
            raise_first_fault(self._control, failure)
        self.transport.remember_shapes()
        log.end()


def open_session(
    find_lowered: Callable[[], Lowered], stages: Sequence[_PipelineStageBase], timeouts: Timeouts
) -> Session:
    """Connect the ranks of a schedule; every rank calls this, and all raise if one must."""
    if stages[0].group_size == 1:
        lowered = _prepare(find_lowered, stages)
        return Session(LocalTransport(1), LocalControl(), NoGuard(), lowered)
    group = stages[0].group or get_default_group()
    beside = groups_beside(stage.submod for stage in stages)
    with opening_guard(group, beside, timeouts) as guard:
        control = GroupControl(group, connections=guard.connections)
        with control.together(cannot("prepare its schedule")):
            lowered = _prepare(find_lowered, stages)
        agree(control, [*version_facts(), schedule_fact(lowered.training)])
        ahead = SENDS_AHEAD if lowered.sends_may_wait else inf
        device = torch.device(stages[0].device)
        transport = GroupTransport(group, device, control=control, sends_ahead=ahead)
        transport.open_channels(messages_in_flight(lowered.training))
        guard.attach(transport, lowered.training)
        return Session(transport, control, guard, lowered)


def _prepare(find_lowered: Callable[[], Lowered], stages: Sequence[_PipelineStageBase]) -> Lowered:
    """Return what the ranks run, with the stages of this rank ready for it."""
    lowered, rank = find_lowered(), stages[0].group_rank
    placement, held = lowered.training.placement, sorted(stage.stage_index for stage in stages)
    if held != (wanted := sorted(placement.stages(rank))):
        raise SizeError(
            f"rank {rank} holds the stages {held}, but its schedule places {wanted} there; give "
            f"each rank the stages of {placement.rank_of_stage} (by stage, the rank that holds it)"
        )
    if lowered.training.rows.has_kind(Kind.BACKWARD_INPUT):
        for stage in stages:
            stage.expect_halves()
    return lowered
