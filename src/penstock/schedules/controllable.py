"""V-Half and V-Min: less memory for a little bubble. https://arxiv.org/abs/2405.15362

Each rank holds a stage on the way down (0) and one on the way up (1). A microbatch takes a fixed
path through the ranks; V-Min over 4 ranks, one column per slot:

    rank 0   F0                   F1 I1                   I0
    rank 1      F0             F1       I1             I0
    rank 2         F0       F1             I1       I0
    rank 3            F0 F1                   I1 I0

The next microbatch starts six slots later, and no two moves of a rank collide; W goes into the
two of six slots that stay free. The longer a path, the more microbatches are in flight at once:
the path sets the memory. Then work is pulled forward into idle slots: a forward only if all that
it overtakes still fits after it, so no rank fills up with microbatches that it cannot finish.

The ranks decide slot by slot what to do, as `planner/order` does; `ir/clock` times orders that are
decided already.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import HELD_CHANGE
from penstock.ir.schedule import Schedule
from penstock.schedules.moves import Moves, assemble, count_microbatches
from penstock.schedules.sizes import require_stages_per_rank

__all__ = ["v_half", "v_min"]

# A rank's work lies in six queues, each in the order of the microbatches: F0 F1 I1 I0 W1 W0.
_F0, _F1, _I1, _I0, _W1, _W0 = _QUEUES = range(6)
_KINDS = (Kind.FORWARD,) * 2 + (Kind.BACKWARD_INPUT,) * 2 + (Kind.BACKWARD_WEIGHT,) * 2
_LOCAL_STAGES = (0, 1, 1, 0, 1, 0)
_HELD_CHANGE: tuple[int, ...] = tuple(HELD_CHANGE[list(_KINDS)].tolist())
_INTERVAL = 6


@dataclass(frozen=True, slots=True)
class _Path:
    """The path of a microbatch: slots per hop down and up, and slots of waiting at each turn."""

    down: int
    up: int
    waits: tuple[int, int, int]


def v_half(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Hold half the activations of ZBV, with at most half the idle time of 1F1B at equal costs."""
    require_stages_per_rank("V-Half", stages_per_rank, 2, instead="InterleavedZeroBubble")
    path = _Path(down=2, up=1, waits=(0, 0 if ranks % 2 else 3, 1))
    return _pull_forward("V-Half", path, ranks, microbatches, limit=2 * ((ranks + 2) // 2))


def v_min(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Hold a third of the activations of ZBV, idle at most two thirds as long as 1F1B."""
    require_stages_per_rank("V-Min", stages_per_rank, 2, instead="InterleavedZeroBubble")
    # The waits keep the moves of a rank apart. Where ranks % 3 is 2, none are needed, but memory
    # has room for a path that waits at every turn, and the bubble is then two slots smaller.
    waits = ((0, 2, 0), (0, 0, 0), (2, 2, 2))[ranks % 3]
    path = _Path(down=1, up=1, waits=waits)
    return _pull_forward("V-Min", path, ranks, microbatches, limit=2 * ((ranks + 4) // 3))


def _pull_forward(
    name: str, path: _Path, ranks: int, microbatches: int, *, limit: int
) -> Schedule:
    """Run all ranks slot by slot; each does what is next on its path, or else what it can."""
    placement = Placement.v(ranks)
    paths = (_planned(path, ranks, rank, microbatches) for rank in range(ranks))
    states = [_RankState(planned, microbatches, limit) for planned in paths]
    while not all(state.is_finished for state in states):
        supplies = _supplies(states, microbatches)
        for state, supply in zip(states, supplies, strict=True):
            state.move(supply)
    orders = [_moves(p.order, placement.stages(rank)) for rank, p in enumerate(states)]
    return assemble(name, orders, placement, microbatches)


def _planned(path: _Path, ranks: int, rank: int, microbatches: int) -> list[int]:
    """Return the queues of one rank's moves in the order of the repeated path."""
    slots = _slots(path, ranks, rank)
    slot = np.add.outer(_INTERVAL * np.arange(microbatches), slots).ravel()
    queues: list[int] = (np.argsort(slot) % _INTERVAL).tolist()
    return queues


def _slots(path: _Path, ranks: int, rank: int) -> list[int]:
    """Return when the first microbatch has its move in each queue of a rank."""
    above, below = rank, ranks - 1 - rank
    turns = [1 + wait for wait in path.waits]
    forward_0 = path.down * above
    forward_1 = forward_0 + path.down * below + turns[0] + path.up * below
    input_1 = forward_1 + path.up * above + turns[1] + path.down * above
    input_0 = input_1 + path.down * below + turns[2] + path.up * below
    slots = [forward_0, forward_1, input_1, input_0]
    for after in (input_1, input_0):
        taken = {slot % _INTERVAL for slot in slots}
        slots.append(
            next(s for s in range(after + 1, after + 1 + _INTERVAL) if s % _INTERVAL not in taken)
        )
    return slots


@dataclass(slots=True)
class _RankState:
    """The state of one rank: its planned queues, what it has done, the activations it holds."""

    planned: list[int]
    microbatches: int
    limit: int
    order: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=lambda: [0] * len(_QUEUES))
    held: int = 0
    head: int = 0
    places: list[list[int]] = field(init=False)
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.places = [[] for _ in _QUEUES]
        self.counts = []
        for place, queue in enumerate(self.planned):
            self.counts.append(len(self.places[queue]))
            self.places[queue].append(place)

    @property
    def is_finished(self) -> bool:
        """Whether all planned work is done."""
        return self.head == len(self.planned)

    def move(self, supply: Sequence[int]) -> None:
        """Make one move, if the inputs of one are there; `supply` counts them per queue."""
        if self.is_finished:
            return
        queue = self.planned[self.head]
        # With no new microbatch left to make room for, weight work can wait.
        can_wait = queue >= _W1 and self.done[_F0] == self.microbatches
        if supply[queue] == self.done[queue] or can_wait:
            ready = [queue for queue in _QUEUES if self.done[queue] < supply[queue]]
            choices = [
                (queue >= _W1, self._place(queue), queue) for queue in ready if self._fits(queue)
            ]
            if not choices:
                return
            queue = min(choices)[-1]
        self._do(queue)

    def _place(self, queue: int) -> int:
        return self.places[queue][self.done[queue]]

    def _fits(self, queue: int) -> bool:
        """Return whether this move, and then all that it overtakes, stays within the limit."""
        if _HELD_CHANGE[queue] <= 0:
            return True
        held = self.held + 1
        for place in range(self.head, self._place(queue)):
            if held > self.limit:
                return False
            other = self.planned[place]
            if self.counts[place] >= self.done[other]:
                held += _HELD_CHANGE[other]
        return held <= self.limit

    def _do(self, queue: int) -> None:
        self.order.append(queue)
        self.done[queue] += 1
        self.held += _HELD_CHANGE[queue]
        while not self.is_finished and self.counts[self.head] < self.done[self.planned[self.head]]:
            self.head += 1


def _supplies(states: Sequence[_RankState], microbatches: int) -> list[tuple[int, ...]]:
    """Return, per rank and queue, the number of microbatches whose inputs are there."""
    done = [state.done for state in states]
    supplies: list[tuple[int, ...]] = []
    for rank, own in enumerate(done):
        above = done[rank - 1] if rank else [microbatches, 0, own[_F1], 0]
        below = done[rank + 1] if rank + 1 < len(done) else [0, own[_F0], 0, own[_I1]]
        supplies.append((above[_F0], below[_F1], above[_I1], below[_I0], own[_I1], own[_I0]))
    return supplies


def _moves(order: Sequence[int], stages: Sequence[int]) -> Moves:
    """Return one rank's queues as moves, with the microbatches counted."""
    queues = np.array(order)
    kind, local = np.array(_KINDS)[queues], np.array(_LOCAL_STAGES)[queues]
    microbatch = count_microbatches(kind, local, len(stages))
    return Moves(kind, np.array(stages)[local], microbatch, np.zeros(len(queues), np.bool_))
