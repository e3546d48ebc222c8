"""Why a step takes as long as it does: the critical path, the idle gaps, what would help."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.costs import COLLECTIVES, Costs, Prices
from penstock.costs.given import costs_or_unit
from penstock.ir.actions import Action, Kind
from penstock.ir.graph import Graph
from penstock.ir.rows import ABSENT
from penstock.ir.schedule import Schedule, require_schedule
from penstock.sim.engine import simulate
from penstock.sim.program import BESIDE_KINDS, COLLECTIVE_KINDS
from penstock.sim.timeline import Span, Timeline

__all__ = ["Explanation", "Gap", "Saving", "explain"]

# By how much `Saving` lowers each cost.
_CHEAPER_BY = 0.05

# Costs that are mostly 0, and savings only where they are not.
_RARE = ("host_action", "host_message", *COLLECTIVES)


@dataclass(frozen=True, slots=True)
class Gap:
    """Idle time on a rank: from when to when, what started after it, and what that waited for.

    `transfer_seconds` is the part of the gap in which the awaited value was on its way.
    """

    rank: int
    start: float
    end: float
    action: Action
    waited_for: Action
    waited_for_rank: int
    transfer_seconds: float

    @property
    def seconds(self) -> float:
        """How long the rank was idle."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Saving:
    """The time that a step would save if one cost were 5 % lower."""

    cost: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The timeline of a schedule, with the reasons for its end time."""

    timeline: Timeline
    critical_path: tuple[Span, ...]
    gaps: tuple[Gap, ...]
    savings: tuple[Saving, ...]

    def __repr__(self) -> str:
        return (
            f"<Explanation of {self.timeline.schedule.name}: end time "
            f"{self.timeline.end_time:.4g} s, actions on the critical path: "
            f"{len(self.critical_path)}, idle gaps: {len(self.gaps)}>"
        )

    @property
    def critical_seconds(self) -> dict[str, float]:
        """Seconds of the critical path by kind of action; the rest of it is transfers."""
        seconds: dict[str, float] = {}
        for span in self.critical_path:
            kind = span.action.kind.text
            seconds[kind] = seconds.get(kind, 0.0) + span.end - span.start
        # Where nothing takes any time, the path may be nothing but unsharding.
        path = self.critical_path
        whole = path[-1].end - path[0].start if path else 0.0
        return seconds | {"transfer": max(0.0, whole - sum(seconds.values()))}

    @property
    def idle_seconds(self) -> dict[str, float]:
        """Seconds of all gaps, by the kind of work that was waited for, transfers apart."""
        seconds: dict[str, float] = {}
        for gap in self.gaps:
            kind = gap.waited_for.kind.text
            seconds[kind] = seconds.get(kind, 0.0) + gap.seconds - gap.transfer_seconds
            seconds["transfer"] = seconds.get("transfer", 0.0) + gap.transfer_seconds
        return {cause: value for cause, value in seconds.items() if value > 0}


def explain(schedule: Schedule, costs: Costs | None = None) -> Explanation:
    """Explain what sets the end time, why ranks are idle, and which cost matters most.

    >>> from penstock.assembly import build
    >>> found = explain(build("GPipe", ranks=2, microbatches=2))
    >>> " ".join(str(span.action) for span in found.critical_path)
    '0F0 1F0 1F1 1B0 0B0 0B1'
    """
    require_schedule(schedule)
    costs = costs_or_unit(costs).of_stages(schedule)
    timeline = simulate(schedule, costs)
    reasons = _Reasons(timeline)
    return Explanation(
        timeline, reasons.critical_path(), reasons.gaps(), _savings(timeline, costs)
    )


class _Reasons:
    """For each row: when its rank was free, and which need came last."""

    def __init__(self, timeline: Timeline) -> None:
        assert timeline.program is not None, "it was simulated"
        self.timeline, self.program = timeline, timeline.program
        self.rows = self.program.rows
        self.graph: Graph = self.program.graph
        self.prices: Prices = self.program.prices
        self.start = self.program.run().start
        self.opens = self.rows.opening_row()
        self.free_at = self._free_at()
        self.last_need = self._last_need()

    def _free_at(self) -> NDArray[np.float64]:
        """Return when each row's rank became free; for a first row, its own start."""
        start = self.start
        free = np.empty(len(start))
        free[1:] = (start + self.prices.busy)[:-1]
        free[self.rows.first[:-1]] = start[self.rows.first[:-1]]
        return free[self.opens]

    def _last_need(self) -> NDArray[np.int64]:
        """Return, for each work's opening row, the slot of the need that arrived last, or -1."""
        graph, start = self.graph, self.start
        arrival = start[graph.need] + self.prices.duration[graph.need] + self.prices.lag
        work = self.opens[np.repeat(np.arange(len(start)), np.diff(graph.first))]
        latest = np.full(len(start), -np.inf)
        np.maximum.at(latest, work, arrival)
        slot = np.full(len(start), ABSENT, dtype=np.int64)
        is_last = np.flatnonzero(arrival == latest[work])
        slot[work[is_last]] = is_last
        return slot

    def gaps(self) -> tuple[Gap, ...]:
        """Return the idle gaps of every rank, in its order."""
        start = self.start
        tolerance = 1e-12 * max(1.0, self.timeline.end_time)
        waits = (start > self.free_at + tolerance) & (self.last_need != ABSENT)
        waits &= ~self.rows.joined & self._has_begun()
        waits[len(self.timeline.schedule.rows) :] = False
        return tuple(self._gap(int(row)) for row in np.flatnonzero(waits))

    def _has_begun(self) -> NDArray[np.bool_]:
        """Return, per row, whether its rank has computed before; until then it is not idle."""
        computes = np.cumsum(self.rows.is_compute)
        before = np.concatenate(([0], computes))
        first = np.repeat(before[self.rows.first[:-1]], np.diff(self.rows.first))
        is_later: NDArray[np.bool_] = before[:-1] > first
        return is_later

    def _gap(self, row: int) -> Gap:
        slot = int(self.last_need[row])
        need = int(self.graph.need[slot])
        begin, end = float(self.free_at[row]), float(self.start[row])
        rows, lag = self.rows, float(self.prices.lag[slot])
        if need >= len(self.timeline.schedule.rows) and rows.kind[need] not in BESIDE_KINDS:
            # On a shared wire, a message has a row of its own.
            lag += float(self.start[need] + self.prices.duration[need]) - self._sent(need)
        on_its_way = min(lag, end - begin)
        return Gap(
            rows.rank(row),
            begin,
            end,
            action=rows.action(row),
            waited_for=rows.action(need),
            waited_for_rank=self.timeline.schedule.rows.rank(int(self.program.origin[need])),
            transfer_seconds=on_its_way,
        )

    def _sent(self, message: int) -> float:
        """Return when the work ended whose value a message on a wire carries."""
        origin = int(self.program.origin[message])
        return float(self.start[origin] + self.prices.duration[origin])

    def critical_path(self) -> tuple[Span, ...]:
        """Return the path from the first action to the end of the rank that ends last.

        Each span is what the next one waited for, on another rank or on its own.
        """
        size = len(self.timeline.schedule.rows)
        row = int(np.argmax(self.timeline.end))
        beside = np.flatnonzero((self.program.origin == row) & (np.arange(len(self.rows)) >= size))
        if self.program.is_beside[row]:
            row = int(beside[0])
        path = [row]
        while (before := self._cause(row)) != ABSENT:
            path.append(before)
            row = before
        is_shown = self.rows.is_compute.copy()
        # A message of a wire has the row of its work, which is on the path by itself.
        is_shown[size:] = self.rows.is_kind(*BESIDE_KINDS)[size:]
        is_blocking = self.rows.is_kind(*COLLECTIVE_KINDS)[:size] & (self.prices.busy[:size] > 0)
        is_shown[:size] |= self.rows.is_kind(Kind.RECOMPUTE)[:size]
        is_shown[:size] |= is_blocking & ~self.program.is_beside
        shown = dict.fromkeys(int(self.program.origin[row]) for row in path if is_shown[row])
        return tuple(self.timeline.span(row) for row in reversed(shown))

    def _cause(self, row: int) -> int:
        """Return the row that kept this one from starting earlier."""
        row = int(self.opens[row])
        rank = self.rows.rank(row)
        slot = int(self.last_need[row])
        if slot != ABSENT and self.start[row] > self.free_at[row]:
            return int(self.graph.need[slot])
        if row > self.rows.first[rank]:
            return row - 1
        return int(self.graph.need[slot]) if slot != ABSENT else ABSENT


def _savings(timeline: Timeline, costs: Costs) -> tuple[Saving, ...]:
    names = ["forward", "backward_input", "backward_weight", "transfer"]
    if costs.full_backward is not None:
        names.append("full_backward")
    names += [name for name in _RARE if np.any(getattr(costs, name))]
    savings = []
    for name in names:
        cheaper = simulate(timeline.schedule, _scale(costs, name, 1 - _CHEAPER_BY))
        # Cheaper work never ends later; what is below 0 is a rounding error.
        gain = max(0.0, timeline.end_time - cheaper.end_time)
        savings.append(Saving(name, gain, gain / timeline.end_time if timeline.end_time else 0.0))
    return tuple(sorted(savings, key=lambda saving: -saving.seconds))


def _scale(costs: Costs, name: str, factor: float) -> Costs:
    """Return the costs with one of them multiplied."""
    value = np.asarray(getattr(costs, name)) * factor
    return replace(costs, **{name: value.tolist()})
