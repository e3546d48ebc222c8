"""One case of a soak: a schedule, a model, batches, bad links and sometimes a fault.

A case depends on the seed of the soak and its own number alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, TypeAlias, get_args

from penstock.ir.actions import Action, Overlap
from penstock.ir.schedule import Schedule
from penstock.ranks.fault_injection import Drop, FaultInjection
from penstock.tools.soak.models import MOST_ROWS_MISSING, Model, SoakBatch, draw_batch, draw_model
from penstock.tools.soak.schedules import draw_schedule

__all__ = ["FaultKind", "InjectedFault", "SoakCase", "draw_case"]

# What happens to a rank: an error, an exit, a signal that kills or stops it, or a lost link.
FaultKind: TypeAlias = Literal["raise", "exit", "kill", "stop", "drop"]

_MOST_STEPS = 6
_SHARE_OF_PROCESSES = 0.4
_SHARE_OF_FAULTS = 0.3
_SHARE_OF_REPLICAS = 0.3
_SHARE_BY_ORDER = 0.25
_SHARE_SAVED = 0.25
_LONGEST_DELAY = 0.0005
# What may happen to a rank with replicas: after an error these may continue without it.
_FAULTS_WITH_REPLICAS: tuple[FaultKind, ...] = ("exit", "kill", "stop")


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A rank that fails in a step: when it should run an action, or at a message."""

    kind: FaultKind
    rank: int
    step: int
    action: Action


@dataclass(frozen=True, slots=True)
class SoakCase:
    """Everything that a process must know to run its part of a case."""

    number: int
    schedule: Schedule
    model: Model
    batches: tuple[SoakBatch, ...]
    uses_processes: bool
    fault_injection: FaultInjection
    fault: InjectedFault | None
    replicas: int = 1
    # After which step all is saved, to be loaded at the end.
    saved_after: int | None = None

    @property
    def num_processes(self) -> int:
        """How many processes run the case."""
        return self.schedule.num_ranks * self.replicas if self.uses_processes else 1

    def __str__(self) -> str:
        where = "processes" if self.uses_processes else "one process"
        what = f"case {self.number}: {self.schedule.name}, {self.schedule.num_ranks} ranks, "
        what += f"{self.schedule.num_stages} stages, {self.schedule.microbatches} microbatches, "
        what += f"{len(self.batches)} steps in {where}"
        if self.replicas > 1:
            what += f", {self.replicas} replicas"
        if self.fault_injection.by_order:
            what += ", messages by order"
        if self.saved_after is not None:
            what += f", saved after step {self.saved_after}"
        if self.fault is None:
            return what
        fault, drop = self.fault, self.fault_injection.drop
        when = f"in step {fault.step} at {fault.action}"
        if drop is not None:
            when = f"after {drop.after} messages"
        return f"{what}, {fault.kind} on rank {fault.rank} {when}"


def draw_case(seed: int, number: int, *, ranks: int, has_faults: bool) -> SoakCase:
    """Return the case with this number of the soak with this seed.

    >>> case = draw_case(0, 3, ranks=2, has_faults=False)
    >>> case == draw_case(0, 3, ranks=2, has_faults=False)
    True
    """
    chance = Random(f"{seed} {number}")
    schedule = draw_schedule(chance, ranks)
    steps = chance.randint(2, _MOST_STEPS)
    batches = [draw_batch(chance, schedule.microbatches) for _ in range(steps)]
    # Steps with shapes that were seen before run without headers.
    batches += chance.sample(batches, steps // 2)
    uses_processes = chance.random() < _SHARE_OF_PROCESSES
    fault_seed, delay = chance.getrandbits(32), chance.uniform(0, _LONGEST_DELAY)
    model = draw_model(chance, schedule.dataflow.num_parts)
    has_messages = uses_processes and schedule.num_ranks > 1
    can_fail = has_messages and not schedule.is_forward_only
    by_order = has_messages and chance.random() < _SHARE_BY_ORDER
    # Copies of a stage that share a parameter with another rank are beyond DDP.
    can_have_replicas = can_fail and 2 * schedule.num_ranks <= ranks and not model.is_tied
    has_replicas = can_have_replicas and chance.random() < _SHARE_OF_REPLICAS
    saving = Random(f"saved {seed} {number}")
    is_saved = saving.random() < _SHARE_SAVED
    fault = drop = None
    if has_faults and can_fail and chance.random() < _SHARE_OF_FAULTS:
        kinds = _FAULTS_WITH_REPLICAS if has_replicas else get_args(FaultKind)
        fault = _draw_fault(chance, schedule, len(batches), kinds)
        if fault.kind == "drop":
            drop = Drop(fault.rank, after=chance.randrange(schedule.microbatches))
    return SoakCase(
        number=number,
        schedule=schedule,
        model=model if not schedule.is_forward_only else replace(model, adding_loss=frozenset()),
        batches=tuple(batches),
        uses_processes=uses_processes,
        fault_injection=FaultInjection(
            fault_seed, delay, reorders=not by_order, drop=drop, by_order=by_order
        ),
        fault=fault,
        replicas=2 if has_replicas else 1,
        saved_after=saving.randrange(len(batches)) if is_saved else None,
    )


def _draw_fault(
    chance: Random, schedule: Schedule, steps: int, kinds: Sequence[FaultKind]
) -> InjectedFault:
    # A batch may be too small for the last microbatches.
    last = max(0, schedule.microbatches - 1 - MOST_ROWS_MISSING)
    rank, work = chance.choice(
        [
            (rank, action)
            for rank in range(schedule.num_ranks)
            for action in _actions(schedule, rank)
            if action.microbatch is not None and action.microbatch <= last
        ]
    )
    return InjectedFault(chance.choice(kinds), rank, chance.randrange(steps), work)


def _actions(schedule: Schedule, rank: int) -> list[Action]:
    works = schedule.order(rank)
    return [a for work in works for a in (work.actions if isinstance(work, Overlap) else [work])]
