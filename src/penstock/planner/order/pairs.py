"""Overlapped pairs where they pay: two neighbours of different microbatches and kinds.

apart    0F3  0B1  0F4  0B2            a pair ends sooner than its members one after the other,
paired   (0F3;0B1) (0F4;0B2)           but what needs its forward waits until the pair ends

Pairs of a kind that saves nothing stay apart, and so do pairs that make the step longer. Which do
is found by trying: all that are possible, those of each kind, and then without one stretch after
another.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from penstock.costs import Costs, gain_of_rows
from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.passes.overlap import join_where_possible
from penstock.planner.order.queues import Longs
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from penstock.sim.period import Boundary
from penstock.sim.timeline import Timeline
from penstock.units import format_share

__all__ = ["describe_pairs", "in_lockstep", "make_apart", "step_seconds", "with_pairs"]

# At most this many schedules are tried, and about this many rows of them.
_MOST_TRIED = 60
_MOST_ROWS = 1_000_000
# An order is made for pairs if at least this many of its size may be tried.
_FEWEST_TRIED = 10
_ROUNDING = 1e-9


def with_pairs(schedule: Schedule, problem: SchedulingProblem) -> Schedule:
    """Return the schedule with the pairs that make its step shorter and keep the limit."""
    left = min(_MOST_TRIED, int(_MOST_ROWS / len(schedule.rows)))
    saved = _savings(schedule, problem.costs)
    best, least = schedule, step_seconds(schedule, problem)
    for order in (np.argsort(-saved, kind="stable"), np.arange(len(saved))):
        pairs = _choose(schedule, order[saved[order] > 0])
        length = len(pairs)
        attempts = iter([pairs])
        while left > 0:
            attempt = next(attempts, None)
            if attempt is None:
                # Without one stretch after another, each half as long as the ones before.
                length //= 2
                if not length:
                    break
                attempts = _without_stretches(pairs, length)
                continue
            left -= 1
            paired = _join(schedule, attempt)
            seconds = step_seconds(paired, problem)
            if seconds < least * (1 - _ROUNDING):
                best, least, pairs = paired, seconds, attempt
    return best


def in_lockstep(problem: SchedulingProblem) -> Iterator[Schedule]:
    """Yield the order in which each rank has a forward and a backward that nobody waits for.

    Ranks run a pair at a time, all together, so a microbatch takes one pair's time for each stage
    on its way: twice as many are in flight as in 1F1B. It is for one stage per rank.

    rank 0    F0 F1 F2 F3 F4 (F5;B0) (F6;B1) (F7;B2) B3 ...
    rank 1       F0 F1 F2 (F3;B0) (F4;B1) (F5;B2) (F6;B3) ...
    rank 2          F0 (F1;B0) (F2;B1) (F3;B2) (F4;B3) ...
    """
    ranks, count = problem.ranks, problem.microbatches
    is_large = 2 * ranks * count * _FEWEST_TRIED > _MOST_ROWS
    if problem.placement != Placement.loop(ranks) or is_large:
        return
    orders = []
    for rank in range(ranks):
        ahead = min(count, 2 * (ranks - rank) - 1)
        order = [f"{rank}F{number}" for number in range(ahead)]
        for number in range(count):
            order += [f"{rank}F{number + ahead}"] * (number + ahead < count)
            order.append(f"{rank}B{number}")
        orders.append(order)
    yield Schedule.from_orders(orders, name="lockstep")


def make_apart(schedule: Schedule) -> Schedule:
    """Return the schedule with every overlap taken apart."""
    none = np.zeros(len(schedule.rows), dtype=np.bool_)
    return replace(schedule, rows=replace(schedule.rows, joined=none))


def describe_pairs(timeline: Timeline, costs: Costs, boundary: Boundary) -> list[str]:
    """Return a line that says what overlapped pairs save, if there are any."""
    schedule = timeline.schedule
    pairs = int(schedule.rows.joined.sum())
    if not pairs:
        return []
    before, after = (
        simulate(make_apart(schedule), costs).period(boundary),
        timeline.period(boundary),
    )
    share = (before - after) / before if before else 0.0
    return [
        f"{pairs} overlapped pair{'s' * (pairs > 1)} save {before - after:.4g} s of a step "
        f"({format_share(share)}) beside the same order without them"
    ]


def step_seconds(schedule: Schedule, problem: SchedulingProblem) -> float:
    """Return the seconds of a step, infinite if it does not keep the limit."""
    timeline = simulate(schedule, problem.costs)
    peaks = np.array(timeline.rank_peak_bytes)
    fits = (peaks <= np.array(problem.memory) * (1 + _ROUNDING)).all()
    return timeline.period(problem.boundary) if fits else np.inf


def _savings(schedule: Schedule, costs: Costs) -> Floats:
    """Return, for each row, what it would save together with the row after it."""
    rows = schedule.rows
    length = simulate(schedule, costs.without_collectives())
    seconds = length.end - length.start
    is_last = np.zeros(len(rows), dtype=np.bool_)
    is_last[rows.first[1:] - 1] = True
    alone = ~rows.in_overlap()
    after = np.roll(np.arange(len(rows)), -1)
    differ = (rows.microbatch != rows.microbatch[after]) & (rows.kind != rows.kind[after])
    may_join = ~is_last & alone & alone[after] & differ
    gains = np.zeros(len(rows))
    for parity in (0, 1):
        # Every second row, so that no row is in two pairs.
        joined = np.zeros(len(rows), dtype=np.bool_)
        joined[after[parity::2]] = may_join[parity::2]
        gain = gain_of_rows(costs.overlap_gain, replace(rows, joined=joined))
        gains[parity::2] = np.where(may_join, gain, 0.0)[parity::2]
    return gains * np.minimum(seconds, seconds[after])


def _choose(schedule: Schedule, order: Longs) -> Longs:
    """Return the first rows of pairs, taken in this order while both of their rows are free."""
    is_free = np.ones(len(schedule.rows) + 1, dtype=np.bool_)
    chosen = []
    for row in order.tolist():
        if is_free[row] and is_free[row + 1]:
            is_free[row] = is_free[row + 1] = False
            chosen.append(row)
    return np.sort(np.array(chosen, dtype=np.int64))


def _without_stretches(pairs: Longs, length: int) -> Iterator[Longs]:
    for begin in range(0, len(pairs), length):
        yield np.delete(pairs, slice(begin, begin + length))


def _join(schedule: Schedule, pairs: Longs) -> Schedule:
    """Return the schedule with these pairs joined, F first, but for those that cannot be.

    Those stay in their order: a forward that comes before the backward may wait for it.
    """
    wanted = schedule.rows.joined.copy()
    wanted[pairs + 1] = True
    paired = join_where_possible(schedule, wanted)
    rows = paired.rows
    index = np.arange(len(rows))
    swapped = pairs[rows.joined[pairs + 1] & (rows.kind[pairs + 1] == Kind.FORWARD)]
    index[swapped], index[swapped + 1] = swapped + 1, swapped
    return replace(paired, rows=replace(rows.take(index, rows.first), joined=rows.joined))
