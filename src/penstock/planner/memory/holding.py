"""What one rank holds while it runs its order, and what gives way where that is too much.

order      F0   F1   F2   F3 (no room)   B0   B1   B2   B3
kept        0   01   012  0123 -> 012
gives way                 2: copied out since F2, free from here on, back before B2

At the first row without room, something that was saved gives way: what costs least per byte, and
of what costs nothing, the one whose backward is furthest away. It is offloaded here if its copy
has ended by then and can be back in time, or else recomputed, as if its forward had saved only its
inputs from the beginning. Times are those of a run without limits, or of an earlier attempt.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np

from penstock.ir.actions import Kind
from penstock.ir.rows import Floats

__all__ = ["Insertion", "RankOrder", "Saved", "hold"]

_GRACE = 1e-9


@dataclass(frozen=True, slots=True)
class Saved:
    """What one forward of a rank saves.

    `forward` and `backward` are positions in the rank's order, `bytes` what is saved, `inputs`
    what is left of it if it is recomputed. `copy` is the seconds of a copy to the host or back,
    and `again` those of a recomputation that are not hidden by waiting.
    """

    stage: int
    microbatch: int
    forward: int
    backward: int
    bytes: float
    inputs: float
    copy: float
    again: float


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """The order of one rank: when each row starts and ends, and the bytes that it frees.

    `frees` has the bytes freed by every row when it ends, and `capacity` what the rank may hold.
    """

    saved: tuple[Saved, ...]
    start: Floats
    end: Floats
    frees: Floats
    capacity: float


@dataclass(frozen=True, slots=True)
class Insertion:
    """A memory action that goes before a position of a rank's order."""

    kind: Kind
    saved: Saved
    before: int


@dataclass(slots=True)
class _State:
    """What is held at a position of the order."""

    order: RankOrder
    means: frozenset[Kind]
    capacity: float
    is_latest_first: bool = False
    held: float = 0.0
    out_is_free: float = 0.0
    kept: list[Saved] = field(default_factory=list)
    recomputed: set[Saved] = field(default_factory=set)
    away: dict[Saved, tuple[int, float]] = field(default_factory=dict)

    def make_room(self, position: int) -> bool:
        """Let things give way until what is held fits; return whether that was possible."""
        while self.held > self.capacity * (1 + _GRACE):
            choices = [choice for saved in self.kept for choice in self._ways(saved, position)]
            if not choices:
                return False
            _, _, kind, saved, ready = min(choices, key=self._rank)
            self.kept.remove(saved)
            if kind is Kind.RECOMPUTE:
                self.recomputed.add(saved)
                self.held -= saved.bytes - saved.inputs
            else:
                self.away[saved] = position, ready
                self.out_is_free = ready
                self.held -= saved.bytes
        return True

    def _rank(self, choice: tuple[float, float, Kind, Saved, float]) -> tuple[float, float]:
        cost, due = choice[:2]
        return (due, cost) if self.is_latest_first else (cost, due)

    def _ways(self, saved: Saved, position: int) -> list[tuple[float, float, Kind, Saved, float]]:
        """Return what it costs per byte to do without something here, for each way to do that."""
        found = []
        order, now = self.order, float(self.order.start[position])
        due = float(order.start[saved.backward])
        if Kind.RECOMPUTE in self.means and saved.bytes > saved.inputs:
            gain = saved.bytes - saved.inputs
            found.append((saved.again / gain, -due, Kind.RECOMPUTE, saved, 0.0))
        is_over = saved.forward < position < saved.backward
        if Kind.OFFLOAD in self.means and is_over and saved.bytes:
            ready = max(float(order.end[saved.forward]), self.out_is_free) + saved.copy
            stall = max(0.0, ready - now) + max(0.0, max(now, ready) + saved.copy - due)
            found.append((stall / saved.bytes, -due, Kind.OFFLOAD, saved, ready))
        return found


def hold(
    order: RankOrder, means: frozenset[Kind], reserve: float, *, is_latest_first: bool = False
) -> list[Insertion] | None:
    """Return what to insert so that a rank keeps within its capacity, or None if nothing does.

    `reserve` bytes stay free as long as something is away, so that it can come back early. With
    `is_latest_first` gives way what is needed latest, whatever it costs.
    """
    by_forward = {saved.forward: saved for saved in order.saved}
    by_backward = {saved.backward: saved for saved in order.saved}
    state = _State(order, means, max(0.0, order.capacity - reserve), is_latest_first)
    again: list[Insertion] = []
    for position in range(len(order.start)):
        if (saved := by_forward.get(position)) is not None:
            state.held += saved.bytes
            state.kept.append(saved)
        elif (saved := by_backward.get(position)) is not None:
            # What comes back now may use the reserve, and must not give way again.
            state.capacity = order.capacity
            if saved in state.recomputed:
                again.append(Insertion(Kind.RECOMPUTE, saved, position))
                state.held += saved.bytes - saved.inputs
            elif saved in state.away:
                state.held += saved.bytes
            else:
                state.kept.remove(saved)
        if not state.make_room(position):
            return None
        state.capacity = max(0.0, order.capacity - reserve)
        state.held -= order.frees[position]
    return again + _place_copies(order, state)


def _place_copies(order: RankOrder, state: _State) -> list[Insertion]:
    """Place OFFLOADs where their copies have ended, and RELOADs early enough if there is room."""
    outs: list[Insertion] = []
    held = _held_after(order, state)
    for saved, (latest, ready) in state.away.items():
        first = saved.forward + 1
        ended = int(np.searchsorted(order.start[first:latest], ready)) + first
        outs.append(Insertion(Kind.OFFLOAD, saved, ended))
        held[ended:latest] -= saved.bytes
    backs: list[Insertion] = []
    starts = inf
    earliest = {out.saved: out.before for out in outs}
    for saved in sorted(state.away, key=lambda saved: -saved.backward):
        starts = min(float(order.start[saved.backward]), starts) - saved.copy
        before = saved.backward
        while before > earliest[saved] and order.start[before] > starts:
            if held[before - 1] + saved.bytes > order.capacity * (1 + _GRACE):
                break
            before -= 1
            held[before] += saved.bytes
        backs.append(Insertion(Kind.RELOAD, saved, before))
    return outs + backs


def _held_after(order: RankOrder, state: _State) -> Floats:
    """Return what is held during each row, with OFFLOADs and RELOADs as late as possible."""
    change = np.zeros(len(order.start) + 1)
    for saved in order.saved:
        taken = saved.inputs if saved in state.recomputed else saved.bytes
        change[saved.forward] += taken
        change[saved.backward] += saved.bytes - taken
        if saved in state.away:
            change[state.away[saved][0]] -= saved.bytes
            change[saved.backward] += saved.bytes
    change[1:] -= order.frees
    held: Floats = np.cumsum(change)[:-1]
    return held
