"""Simulated annealing: improve an order by moving one action at a time, for small problems.

rank 0   F F F I W[F]I W        an action moves some places up or down its rank's order; the whole
rank 1     F I F  I F W         order is timed again, and kept if it takes no longer or, less and
                                less often, if it takes a little longer

A move changes which row waits for which, so the times come from queues and counters and not from
`ir/clock`, whose graph would have to be built again for every move. A test compares the two.
"""

from collections.abc import Callable
from math import exp, inf
from typing import Any, NamedTuple

import numpy as np

from penstock.ir.loops import filled
from penstock.planner.order.loops import Columns, compiled
from penstock.planner.order.queues import Longs, Queues

__all__ = ["MOVES", "anneal"]

# How much slower an accepted order may be, in cycles: it cools down from each of these
# temperatures in turn, and starts from the best order each time.
_TEMPERATURES = (0.02, 0.1, 0.4, 0.05, 0.2, 0.05)

# The farthest that an action is moved, in places.
_REACH = 8

# Between orders of equal seconds, the one with the smaller mean over the ranks is better.
_WEIGHT_OF_MEAN = 0.01

# The number of moves between two looks at the clock.
MOVES = 1000


class _Orders(NamedTuple):
    """The current order, the best so far with its seconds, and the last random number."""

    current: Any
    best: Any
    seconds: Any
    random: Any


class _Scratch(NamedTuple):
    """The columns that timing an order writes.

    `ended` has the end of each queue's microbatches, `awaited_by` the rank that waits for a queue,
    `ready` the ranks that may continue; the others are per queue (`done`) or per rank.
    """

    done: Any
    awaited_by: Any
    ended: Any
    position: Any
    ready: Any
    clock: Any
    began: Any
    held: Any


class _Move(NamedTuple):
    """Rows `begin` to `middle` and `middle` to `end` change places, or the first and the last."""

    begin: int
    middle: int
    end: int
    is_exchange: bool


def anneal(
    queues: Queues,
    order: Longs,
    *,
    is_compiled: bool,
    progress: Callable[[float, Longs], float],
) -> Longs:
    """Return the best order that annealing meets, starting from this one.

    `progress` gets the best seconds so far, with their order, and returns which share of the
    annealing is over; 1 ends it.
    """
    loop: Callable[..., bool] = compiled(_make_moves, *_PARTS) if is_compiled else _make_moves

    def give(column: Any) -> Any:
        return column.copy() if is_compiled else column.tolist()

    columns = queues.columns(is_compiled=is_compiled)
    starts = (order, order, np.full(1, inf), np.ones(1, dtype=np.int64))
    orders = _Orders(*map(give, starts))
    spell = 0
    while (part := progress(orders.seconds[0], np.asarray(orders.best))) < 1:
        if spell != int(part * len(_TEMPERATURES)):
            spell = int(part * len(_TEMPERATURES))
            orders.current[:] = orders.best
        cooled = part * len(_TEMPERATURES) - spell
        temperature = _TEMPERATURES[spell] * queues.cycle * (1 - cooled) ** 2
        loop(columns, temperature, orders)
    return np.asarray(orders.best)


def _empty_scratch(columns: Columns, num_rows: int) -> _Scratch:
    num_queues, num_ranks = 3 * columns.stages, len(columns.capacity)
    return _Scratch(
        filled(num_queues, 0),
        filled(num_queues, 0),
        filled(num_rows, 0.0),
        filled(num_ranks, 0),
        filled(num_ranks, 0),
        filled(num_ranks, 0.0),
        filled(num_ranks, 0.0),
        filled(num_ranks, 0.0),
    )


def _make_moves(columns: Columns, temperature: float, orders: _Orders) -> bool:
    """Time the current order, then try moves; keep `orders` up to date."""
    order, random = orders.current, orders.random
    scratch = _empty_scratch(columns, len(order))
    value = inf
    for turn in range(MOVES + 1):
        move = _Move(0, 0, 0, False)
        if turn > 0:
            move = _draw_move(columns, random, len(order))
            _do(order, move)
        longest = changed = inf
        is_allowed = _time(columns, order, scratch)
        if is_allowed:
            longest, total = _measure(columns, scratch)
            changed = longest + _WEIGHT_OF_MEAN * total / len(columns.capacity)
        is_kept = is_allowed and changed <= value
        random[0] = random[0] * 48271 % 2147483647
        if is_allowed and not is_kept and temperature > 0:
            is_kept = random[0] / 2147483647 < exp((value - changed) / temperature)
        if not is_kept:
            _undo(order, move)
            continue
        value = changed
        if longest < orders.seconds[0]:
            orders.seconds[0] = longest
            for row in range(len(order)):
                orders.best[row] = order[row]
    return True


def _draw_move(columns: Columns, random: Any, num_rows: int) -> _Move:
    """Draw one of four moves: one action down or up, a few actions down, or an exchange."""
    first = columns.first
    random[0] = random[0] * 48271 % 2147483647
    begin = random[0] % num_rows
    rank = 0
    while first[rank + 1] * columns.microbatches <= begin:
        rank += 1
    last = first[rank + 1] * columns.microbatches
    random[0] = random[0] * 48271 % 2147483647
    reach = 1 + random[0] % _REACH
    random[0] = random[0] * 48271 % 2147483647
    kind = random[0] % 4
    middle = begin + (1 if kind != 2 else 2 + random[0] // 4 % 2)
    end = min(middle + reach, last)
    middle = min(end - 1 if kind == 1 else middle, end)
    return _Move(begin, middle, end, kind == 3)


def _do(order: Any, move: _Move) -> None:
    """Make a move: exchange two rows, or rotate by three reversals."""
    begin, middle, end, is_exchange = move
    if is_exchange:
        order[begin], order[end - 1] = order[end - 1], order[begin]
    else:
        _reverse(order, begin, middle)
        _reverse(order, middle, end)
        _reverse(order, begin, end)


def _undo(order: Any, move: _Move) -> None:
    """Take a move back."""
    begin, middle, end, is_exchange = move
    if is_exchange:
        order[begin], order[end - 1] = order[end - 1], order[begin]
    else:
        _reverse(order, begin, end)
        _reverse(order, begin, middle)
        _reverse(order, middle, end)


def _reverse(order: Any, low: int, high: int) -> None:
    for offset in range((high - low) // 2):
        row, other = low + offset, high - 1 - offset
        order[row], order[other] = order[other], order[row]


def _time(columns: Columns, order: Any, scratch: _Scratch) -> bool:
    """Run every rank until it must wait; return whether the order finishes within the limits.

    A rank that does what another one waits for wakes it.
    """
    microbatches, stages, first = columns.microbatches, columns.stages, columns.first
    change, capacity, seconds = columns.change, columns.capacity, columns.seconds
    source, lag = columns.source, columns.source_lag
    done, awaited_by, ended, position, ready, clock, began, held = scratch
    num_ranks = len(capacity)
    for queue in range(3 * stages):
        done[queue] = 0
        awaited_by[queue] = -1
    for rank in range(num_ranks):
        position[rank] = first[rank] * microbatches
        clock[rank] = held[rank] = 0.0
        ready[rank] = rank
    num_ready = num_ranks
    while num_ready > 0:
        num_ready -= 1
        rank = ready[num_ready]
        opening = first[rank] * microbatches
        last = first[rank + 1] * microbatches
        while position[rank] < last:
            queue = order[position[rank]]
            number = done[queue]
            moment = clock[rank]
            needed = source[queue]
            entry = queue * microbatches + number
            if needed >= 0:
                if done[needed] <= number:
                    awaited_by[needed] = rank
                    break
                moment = max(moment, ended[needed * microbatches + number] + lag[entry])
            held[rank] += change[entry]
            is_early = queue >= stages and done[queue - stages] <= number
            if is_early or held[rank] > capacity[rank]:
                return False
            if position[rank] == opening:
                began[rank] = moment
            clock[rank] = moment + seconds[entry]
            ended[entry] = clock[rank]
            done[queue] = number + 1
            position[rank] += 1
            if awaited_by[queue] >= 0:
                ready[num_ready] = awaited_by[queue]
                num_ready += 1
                awaited_by[queue] = -1
    is_finished = True
    for rank in range(num_ranks):
        is_finished &= position[rank] == first[rank + 1] * microbatches
    return is_finished


def _measure(columns: Columns, scratch: _Scratch) -> tuple[float, float]:
    """Return the largest of the ranks' seconds, and their sum."""
    longest = total = 0.0
    for rank in range(len(scratch.clock)):
        seconds = scratch.clock[rank] + columns.extra[rank]
        if columns.counts_from_start:
            seconds -= scratch.began[rank]
        longest = max(longest, seconds)
        total += seconds
    return longest, total


_PARTS = (_empty_scratch, _draw_move, _do, _undo, _reverse, _time, _measure)
