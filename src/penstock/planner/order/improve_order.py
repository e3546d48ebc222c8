"""Better orders by moving one action at a time, for problems that are small enough.

rank 0   F F F I W[F]I W        an action goes some places up or down its rank's order; the whole
rank 1     F I F  I F W         is timed again, and stays if it is no slower or, less and less
                                often, if it is a little slower: annealing
"""

from collections.abc import Callable, Iterator
from math import exp, inf
from typing import Any

import numpy as np

from penstock.planner.order.lanes import Lanes, Longs
from penstock.planner.order.loops import compile_loop

__all__ = ["MOVES", "anneal"]

# What a slower order may cost, in cycles. It cools down from each of these, and starts from the
# best order each time.
_WARMTHS = (0.02, 0.1, 0.4, 0.05, 0.2, 0.05)

# An action is moved by up to so many places.
_REACH = 8

# Between orders of one makespan, the one with the smaller mean over the ranks is better.
_WEIGHT_OF_MEAN = 0.01

# So many moves are made between two looks at the clock.
MOVES = 1000


def anneal(
    lanes: Lanes, order: Longs, *, is_compiled: bool, gone: Callable[[float], float]
) -> Longs:
    """The best order that is met on the way from this one.

    `gone` is told the best makespan so far, and tells which part of the way is gone; 1 ends it.
    """
    loop: Callable[..., bool] = compile_loop(_move_actions) if is_compiled else _move_actions

    def give(*columns: Any) -> list[Any]:
        return [column.copy() if is_compiled else column.tolist() for column in columns]

    inputs = (lanes.microbatches, lanes.stages, *give(*_columns(lanes)))
    current, best, numbers, least = give(order, order, np.ones(1, dtype=np.int64), np.full(1, inf))
    scratch = give(*_scratch(lanes))
    spell = 0
    while (part := gone(least[0])) < 1:
        if spell != int(part * len(_WARMTHS)):
            spell = int(part * len(_WARMTHS))
            current[:] = best
        cooled = part * len(_WARMTHS) - spell
        warmth = _WARMTHS[spell] * lanes.cycle * (1 - cooled) ** 2
        loop(*inputs, warmth, current, best, numbers, least, *scratch)
    return np.asarray(best)


def _columns(lanes: Lanes) -> tuple[Any, ...]:
    """What the loop needs to know of a problem; for each lane, the one that it waits for."""
    source = np.full(3 * lanes.stages, -1, dtype=np.int64)
    has_follower = np.flatnonzero(lanes.follower >= 0)
    source[lanes.follower[has_follower]] = has_follower
    lag = np.where(source >= 0, lanes.lag[source], 0.0)
    first = lanes.of_rank[0] * lanes.microbatches
    return first, lanes.change, lanes.room, lanes.seconds, source, lag


def _scratch(lanes: Lanes) -> Iterator[Any]:
    """The columns that the loop writes to for itself."""
    num_lanes, ranks = 3 * lanes.stages, lanes.problem.ranks
    yield np.zeros(num_lanes, dtype=np.int64)
    yield np.zeros(num_lanes, dtype=np.int64)
    yield np.zeros(lanes.num_rows)
    yield np.zeros(ranks, dtype=np.int64)
    yield np.zeros(ranks, dtype=np.int64)
    yield np.zeros(ranks)
    yield np.zeros(ranks)
    yield np.zeros(ranks)


def _move_actions(
    microbatches: int,
    stages: int,
    first: Any,
    change: Any,
    room: Any,
    seconds: Any,
    source: Any,
    lag: Any,
    warmth: float,
    order: Any,
    best: Any,
    numbers: Any,
    least: Any,
    done: Any,
    awaited_by: Any,
    ended: Any,
    position: Any,
    ready: Any,
    clock: Any,
    began: Any,
    held: Any,
) -> bool:
    """Make some moves; keep `order` and `best` up to date.

    `numbers` holds the last random number, `least` the makespan of `best`. `ended` has the end of
    each lane's microbatches, `awaited_by` the rank that waits for a lane, `ready` the ranks to
    look at.
    """
    num_ranks = len(room)
    value = inf
    for turn in range(MOVES + 1):
        # Rows `begin` to `middle` and rows `middle` to `end` change places, in one of four moves:
        # one action down or up, a few actions down, or the first and the last of the rows.
        begin = middle = end = 0
        is_exchange = False
        if turn > 0:
            numbers[0] = numbers[0] * 48271 % 2147483647
            begin = numbers[0] % len(order)
            rank = 0
            while first[rank + 1] <= begin:
                rank += 1
            numbers[0] = numbers[0] * 48271 % 2147483647
            reach = 1 + numbers[0] % _REACH
            numbers[0] = numbers[0] * 48271 % 2147483647
            move = numbers[0] % 4
            is_exchange = move == 3
            middle = begin + (1 if move != 2 else 2 + numbers[0] // 4 % 2)
            end = min(middle + reach, first[rank + 1])
            middle = min(end - 1 if move == 1 else middle, end)
            if is_exchange:
                order[begin], order[end - 1] = order[end - 1], order[begin]
            else:
                for low, high in ((begin, middle), (middle, end), (begin, end)):
                    for offset in range((high - low) // 2):
                        row, other = low + offset, high - 1 - offset
                        order[row], order[other] = order[other], order[row]

        # Run every rank until it must wait; whoever does what it waits for sets it going again.
        for lane in range(3 * stages):
            done[lane] = 0
            awaited_by[lane] = -1
        for rank in range(num_ranks):
            position[rank] = first[rank]
            clock[rank] = held[rank] = 0.0
            ready[rank] = rank
        num_ready = num_ranks
        is_allowed = True
        while num_ready > 0 and is_allowed:
            num_ready -= 1
            rank = ready[num_ready]
            while position[rank] < first[rank + 1]:
                lane = order[position[rank]]
                number = done[lane]
                moment = clock[rank]
                needed = source[lane]
                if needed >= 0:
                    if done[needed] <= number:
                        awaited_by[needed] = rank
                        break
                    moment = max(moment, ended[needed * microbatches + number] + lag[lane])
                held[rank] += change[lane]
                is_early = lane >= stages and done[lane - stages] <= number
                if is_early or held[rank] > room[rank]:
                    is_allowed = False
                    break
                if position[rank] == first[rank]:
                    began[rank] = moment
                clock[rank] = moment + seconds[lane]
                ended[lane * microbatches + number] = clock[rank]
                done[lane] = number + 1
                position[rank] += 1
                if awaited_by[lane] >= 0:
                    ready[num_ready] = awaited_by[lane]
                    num_ready += 1
                    awaited_by[lane] = -1
        longest = total = 0.0
        for rank in range(num_ranks):
            if position[rank] < first[rank + 1]:
                is_allowed = False
            longest = max(longest, clock[rank] - began[rank])
            total += clock[rank] - began[rank]

        # Keep the move, or take it back.
        changed = longest + _WEIGHT_OF_MEAN * total / num_ranks
        numbers[0] = numbers[0] * 48271 % 2147483647
        is_taken = is_allowed and (
            changed <= value
            or (warmth > 0 and numbers[0] / 2147483647 < exp((value - changed) / warmth))
        )
        if is_taken:
            value = changed
            if longest < least[0]:
                least[0] = longest
                for row in range(len(order)):
                    best[row] = order[row]
        elif is_exchange:
            order[begin], order[end - 1] = order[end - 1], order[begin]
        else:
            for low, high in ((begin, end), (begin, middle), (middle, end)):
                for offset in range((high - low) // 2):
                    row, other = low + offset, high - 1 - offset
                    order[row], order[other] = order[other], order[row]
    return True
