"""Recomputing and offloading in a constraint model: what gives way, and when.

bytes of one microbatch    |<-- activation -->|              |<- activation ->|<- stash ->|
rank                       F  |               OFFLOAD        RELOAD |         I           W
copies to the host, back      |--copy--|                     |-copy-|

Or it saves its inputs only, from F to a RECOMPUTE, and all of its activation from there to I. The
copies of a rank in one direction are made one at a time, here in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, isfinite
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.actions import Action, Kind
from penstock.ir.rows import Floats
from penstock.planner.exact.byte_limits import find_unit
from penstock.planner.exact.model import Interval, ScheduleModel
from penstock.planner.problem import SchedulingProblem

if TYPE_CHECKING:
    from collections.abc import Callable

    from ortools.sat.python.cp_model import IntervalVar, IntVar, LinearExprT

__all__ = ["Ways", "add_ways"]


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """A RECOMPUTE that may be: whether it is, and when it runs."""

    is_there: IntVar
    start: IntVar
    interval: IntervalVar


@dataclass(frozen=True, slots=True, eq=False)
class Offloaded:
    """A pair of OFFLOAD and RELOAD that may be: whether it is, and when each is due."""

    is_there: IntVar
    out: IntVar
    back: IntVar
    reload: IntervalVar
    copies: tuple[IntervalVar, IntervalVar]


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """How what one forward saves may give way."""

    stage: int
    microbatch: int
    recomputed: Recomputed | None
    offloaded: Offloaded | None

    def timed_actions(self, value: Callable[[LinearExprT], int]) -> list[tuple[int, int, Action]]:
        """Return the actions of a solution with their times; copies go before what starts then."""
        place = self.stage, self.microbatch
        if (again := self.recomputed) is not None and value(again.is_there):
            start = value(again.start)
            return [(start, start, Action(Kind.RECOMPUTE, *place))]
        if (away := self.offloaded) is not None and value(away.is_there):
            out, back = Action(Kind.OFFLOAD, *place), Action(Kind.RELOAD, *place)
            return [(value(away.out), -2, out), (value(away.back), -1, back)]
        return []


def add_ways(
    filled: ScheduleModel, problem: SchedulingProblem, means: frozenset[Kind]
) -> list[Ways]:
    """Let what forwards save give way by these means, and keep the limits of `problem`.

    `filled` is the model of the same problem without a limit.
    """
    found: list[Ways] = []
    for rank, capacity in enumerate(problem.capacity.tolist()):
        if isfinite(capacity):
            found += _Rank.of(filled, problem, means, rank).fill(capacity)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Rank:
    """Adds the ways of one rank; bytes are per stage and microbatch."""

    filled: ScheduleModel
    stages: tuple[int, ...]
    means: frozenset[Kind]
    activation: Floats
    inputs: Floats
    stash: Floats
    again: Floats
    copy: Floats | None

    @classmethod
    def of(
        cls,
        filled: ScheduleModel,
        problem: SchedulingProblem,
        means: frozenset[Kind],
        rank: int,
    ) -> _Rank:
        costs, stages, scales = problem.costs, problem.stages, problem.scales
        activation = np.multiply.outer(costs.per_stage("activation_bytes", stages), scales)
        seconds = np.multiply.outer(costs.recompute_seconds(stages), scales)
        return cls(
            filled,
            problem.placement.stages(rank),
            means,
            activation,
            np.multiply.outer(costs.saved_input_bytes(stages), scales),
            np.multiply.outer(costs.per_stage("weight_stash_bytes", stages), scales),
            seconds + costs.host_action * (seconds > 0),
            None if costs.host_link is None else activation / costs.host_link,
        )

    def fill(self, capacity: float) -> list[Ways]:
        """Add all ways, and the limits on the time and the bytes of the rank."""
        works = [
            (stage, number)
            for stage in self.stages
            for number in range(self.filled.problem.microbatches)
        ]
        tables = (self.activation, self.inputs, self.stash)
        sizes = {float(table[work]) for work in works for table in tables} - {0.0}
        unit = find_unit([capacity, *sorted(sizes)]) if capacity else 1.0
        held: list[tuple[IntervalVar, int]] = []
        ways = [self._ways(*work) for work in works]
        for work, one in zip(works, ways, strict=True):
            held += self._held(one, *(floor(float(table[work]) / unit) for table in tables))
        self._run_one_at_a_time(ways)
        intervals, demands = [entry[0] for entry in held], [entry[1] for entry in held]
        self.filled.model.add_cumulative(intervals, demands, ceil(capacity / unit))
        return ways

    def _ways(self, stage: int, number: int) -> Ways:
        place = stage, number
        gains = Kind.RECOMPUTE in self.means and self.inputs[place] < self.activation[place]
        again = self._recomputed(stage, number) if gains else None
        can_leave = self.copy is not None and self.activation[place] > 0
        can_leave &= Kind.OFFLOAD in self.means
        away = self._offloaded(stage, number) if can_leave else None
        if again is not None and away is not None:
            self.filled.model.add(again.is_there + away.is_there <= 1)
        return Ways(stage, number, again, away)

    def _recomputed(self, stage: int, number: int) -> Recomputed:
        filled, model = self.filled, self.filled.model
        is_there, start = model.new_bool_var(""), self._time()
        size = filled.ticks.down(self.again[stage, number])
        before, after = filled.forward[stage][number], filled.backward[stage][number]
        model.add(start >= before.end).only_enforce_if(is_there)
        model.add(after.start >= start + size).only_enforce_if(is_there)
        interval = model.new_optional_fixed_size_interval_var(start, size, is_there, "")
        return Recomputed(is_there, start, interval)

    def _offloaded(self, stage: int, number: int) -> Offloaded:
        filled, model = self.filled, self.filled.model
        assert self.copy is not None, "there is a link"
        make = model.new_optional_fixed_size_interval_var
        is_there, out, back = model.new_bool_var(""), self._time(), self._time()
        size = filled.ticks.down(self.copy[stage, number])
        first, second = self._time(), self._time()
        needs = (
            (first, filled.forward[stage][number].end),
            (out, first + size),
            (back, out),
            (second, back),
            (filled.backward[stage][number].start, second + size),
        )
        for later, earlier in needs:
            model.add(later >= earlier).only_enforce_if(is_there)
        copies = make(first, size, is_there, ""), make(second, size, is_there, "")
        return Offloaded(is_there, out, back, make(back, 0, is_there, ""), copies)

    def _held(
        self, way: Ways, activation: int, inputs: int, stash: int
    ) -> list[tuple[IntervalVar, int]]:
        """Return what one microbatch holds and when."""
        filled = self.filled
        forward, backward, weight = (
            actions[way.stage][way.microbatch]
            for actions in (filled.forward, filled.backward, filled.weight)
        )
        kept = filled.model.new_bool_var("")
        others = [one.is_there for one in (way.recomputed, way.offloaded) if one is not None]
        filled.model.add(kept + sum(others) == 1)
        held = [(self._between(forward.start, backward.end, kept), activation)]
        if (again := way.recomputed) is not None:
            before = self._between(forward.start, again.start, again.is_there)
            after = self._between(again.start, backward.end, again.is_there)
            held += [(before, inputs), (after, activation)]
        if (away := way.offloaded) is not None:
            before = self._between(forward.start, away.out, away.is_there)
            after = self._between(away.back, backward.end, away.is_there)
            held += [(before, activation), (after, activation)]
        held.append((self._between(backward.end, weight.end, None), stash))
        return [(interval, size) for interval, size in held if size]

    def _run_one_at_a_time(self, ways: list[Ways]) -> None:
        filled = self.filled
        mine: list[Interval] = [
            piece
            for stage in self.stages
            for actions in (filled.forward, filled.backward, filled.weight)
            for piece in actions[stage]
        ]
        again = [way.recomputed.interval for way in ways if way.recomputed is not None]
        away = [way.offloaded for way in ways if way.offloaded is not None]
        reloads = [one.reload for one in away]
        filled.model.add_no_overlap([*(piece.interval for piece in mine), *again, *reloads])
        for direction in range(2 if away else 0):
            filled.model.add_no_overlap([one.copies[direction] for one in away])

    def _between(
        self, start: LinearExprT, end: LinearExprT, is_there: IntVar | None
    ) -> IntervalVar:
        model, size = self.filled.model, self._time()
        if is_there is None:
            return model.new_interval_var(start, size, end, "")
        return model.new_optional_interval_var(start, size, end, is_there, "")

    def _time(self) -> IntVar:
        return self.filled.model.new_int_var(0, self.filled.horizon, "")
