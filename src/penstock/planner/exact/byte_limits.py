"""The byte limits of a constraint model.

bytes of one microbatch    |<--- activation --->|<-- stash -->|
on its rank                F starts             I ends        W ends
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor, gcd, isfinite, lcm
from typing import TYPE_CHECKING

import numpy as np

from penstock.planner.exact.model import Interval, ScheduleModel

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntervalVar, LinearExprT

__all__ = ["add_bytes", "find_unit"]

# A capacity is counted in units, in at most this many binary digits.
_DIGITS = 24


def add_bytes(filled: ScheduleModel) -> None:
    """Limit the bytes of every rank to its capacity; bytes are rounded down, the capacity up."""
    for rank, capacity in enumerate(filled.problem.capacity.tolist()):
        stages = filled.problem.placement.stages(rank)
        if isfinite(capacity) and capacity > 0:
            _add_capacity(filled, stages, capacity)
            for stage in stages if filled.problem.is_even else ():
                _add_most_held(filled, stage, capacity)


def _add_capacity(filled: ScheduleModel, stages: tuple[int, ...], capacity: float) -> None:
    """Add an interval of bytes per microbatch, and limit their sum at any time."""
    problem = filled.problem
    costs, scales = problem.costs, problem.scales
    taken, left = (
        np.multiply.outer(costs.per_stage(f"{name}_bytes", problem.stages), scales)
        for name in ("activation", "weight_stash")
    )
    sizes = [float(each) for s in stages for table in (taken, left) for each in set(table[s])]
    unit = find_unit([capacity, *sizes])
    intervals: list[IntervalVar] = []
    demands: list[int] = []
    for stage in stages:
        columns = (filled.forward[stage], filled.backward[stage], filled.weight[stage])
        for number, (forward, backward, weight) in enumerate(zip(*columns, strict=True)):
            activation, stash = (floor(table[stage, number] / unit) for table in (taken, left))
            if activation:
                intervals.append(_between(filled, forward.start, backward.end))
                demands.append(activation)
            if stash:
                intervals.append(_between(filled, backward.end, weight.end))
                demands.append(stash)
    filled.model.add_cumulative(intervals, demands, ceil(capacity / unit))


def find_unit(sizes: list[float]) -> float:
    """Return the largest common divisor of sizes, or a small part of the first if it is tiny.

    The solver multiplies bytes with ticks, and that must not overflow.
    """
    exact = [Fraction(size) for size in sizes]
    whole = lcm(*(size.denominator for size in exact))
    unit = Fraction(gcd(*(int(size * whole) for size in exact)), whole)
    return max(float(unit), 2.0**-_DIGITS * sizes[0])


def _between(filled: ScheduleModel, start: LinearExprT, end: LinearExprT) -> IntervalVar:
    size = filled.model.new_int_var(0, filled.horizon, "")
    return filled.model.new_interval_var(start, size, end, "")


def _add_most_held(filled: ScheduleModel, stage: int, capacity: float) -> None:
    """Add the waits that the capacity implies for one stage, since microbatches keep their order.

    The capacity limits the number of microbatches that are between F and I at once, or between I
    and W; where W keeps all that F took, between F and W.
    """
    activation, stash = (
        float(size[stage]) for size in (filled.problem.activation, filled.problem.stash)
    )
    keeps_order = stage not in filled.is_merged
    _wait(filled, filled.forward[stage], filled.backward[stage], capacity, activation)
    if keeps_order:
        _wait(filled, filled.backward[stage], filled.weight[stage], capacity, stash)
    if keeps_order and stash >= activation:
        _wait(filled, filled.forward[stage], filled.weight[stage], capacity, activation)


def _wait(
    filled: ScheduleModel,
    takers: tuple[Interval, ...],
    givers: tuple[Interval, ...],
    capacity: float,
    size: float,
) -> None:
    if size * len(takers) <= capacity:
        return
    # Rounded up where the capacity is a whole number of sizes but for its last bit.
    most = floor(capacity / size * (1 + 1e-9))
    for taker, giver in zip(takers[most:], givers, strict=False):
        filled.model.add(taker.start >= giver.end)
