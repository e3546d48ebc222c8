"""The two loops behind `builder.py`: listing work by urgency, and running the ranks.

They run as plain Python or compiled; see `ir/loops`. Neither calls a function per action, which
would slow both forms down. Columns with an entry per action have it at queue times
microbatches plus microbatch.
"""

from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any, NamedTuple

from penstock.ir.loops import can_compile, compile_loop, filled

__all__ = [
    "PARTS",
    "Columns",
    "Finish",
    "Following",
    "Listing",
    "compiled",
    "follow_list",
    "list_by_urgency",
    "run_ranks",
    "should_compile",
]


class Columns(NamedTuple):
    """A problem as the loops take it: arrays for compiled loops, lists for plain ones.

    The queues of rank r are `queues[first[r]:first[r + 1]]`. `capacity` and `extra` are per rank,
    `holder`, `follower` and `source` per queue, the others per action; see `Queues`. If
    `counts_from_start`, the seconds of a rank are those from its first action to its last, else
    those until its end.
    """

    microbatches: int
    stages: int
    counts_from_start: bool
    first: Any
    queues: Any
    change: Any
    capacity: Any
    extra: Any
    holder: Any
    seconds: Any
    follower: Any
    lag: Any
    source: Any
    source_lag: Any


class Listing(NamedTuple):
    """Every rank's queues, the most urgent first, and whether their bytes fit in that order."""

    queues: Any
    fits: bool


class Following(NamedTuple):
    """The row of every action in its rank's list, and what following the list would hold.

    `held_after` has the bytes after each row; they may be more than there is room for.
    """

    row_of: Any
    held_after: Any
    fits: bool


class Finish(NamedTuple):
    """The order of queues in which the ranks ran, and whether they finished.

    `start` is that of every queue's microbatches, `seconds` those of each rank.
    """

    order: Any
    start: Any
    seconds: Any
    is_finished: bool


def should_compile(*, is_worth_loading: bool) -> bool:
    """Return whether to use compiled loops: they are loaded, or can be and it is worth it."""
    is_loaded = compiled.cache_info().currsize > 0
    return is_loaded or (is_worth_loading and can_compile())


@cache
def compiled(loop: Callable[..., Any], *parts: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop of the planner compiled, loaded once; `parts` are the functions it calls."""
    return compile_loop(loop, *parts)


def list_by_urgency(columns: Columns, urgency: Any) -> Listing:
    """List every rank's queues, the most urgent first.

    A W that frees room moves ahead of work that would not fit in its place.
    """
    microbatches, stages = columns.microbatches, columns.stages
    first, queues = columns.first, columns.queues
    change, capacity = columns.change, columns.capacity
    listed = filled(len(urgency), 0)
    row = 0
    for rank in range(len(capacity)):
        begin = first[rank]
        end = first[rank + 1]
        done = filled(end - begin, 0)
        held = 0.0
        for _ in range((end - begin) * microbatches):
            chosen = weight = fitting = -1
            least = least_weight = least_fitting = inf
            for slot in range(begin, end):
                queue = queues[slot]
                number = done[slot - begin]
                # I comes after F of its microbatch, W after I: the queue listed before it.
                is_early = queue >= stages and number == done[slot - begin - 1]
                if number == microbatches or is_early:
                    continue
                entry = queue * microbatches + number
                value = urgency[entry]
                if value < least:
                    chosen = slot
                    least = value
                if queue >= 2 * stages and value < least_weight:
                    weight = slot
                    least_weight = value
                if value < least_fitting and held + change[entry] <= capacity[rank]:
                    fitting = slot
                    least_fitting = value
            entry = queues[chosen] * microbatches + done[chosen - begin]
            if held + change[entry] > capacity[rank]:
                chosen = weight if weight >= 0 else fitting
                if chosen < 0:
                    return Listing(listed, False)
                entry = queues[chosen] * microbatches + done[chosen - begin]
            done[chosen - begin] += 1
            held += change[entry]
            listed[row] = queues[chosen]
            row += 1
    return Listing(listed, True)


def follow_list(columns: Columns, listed: Any) -> Following:
    """Follow every rank's list of queues, row by row."""
    microbatches, first, change = columns.microbatches, columns.first, columns.change
    row_of, held_after = filled(len(listed), 0), filled(len(listed), 0.0)
    done = filled(3 * columns.stages, 0)
    fits = True
    for rank in range(len(columns.capacity)):
        held = 0.0
        for row in range(first[rank] * microbatches, first[rank + 1] * microbatches):
            queue = listed[row]
            entry = queue * microbatches + done[queue]
            row_of[entry] = row
            done[queue] += 1
            held += change[entry]
            held_after[row] = held
            fits = fits and held <= columns.capacity[rank]
    return Following(row_of, held_after, fits)


# What `run_ranks` calls.
PARTS = (follow_list,)


def run_ranks(columns: Columns, listed: Any, policy: Any) -> Finish:
    """Run all ranks, the earliest clock first, each by its list and a `Policy`.

    This is list scheduling: a rank decides what to do when it is free. (`ir/clock` and `anneal`
    time orders that are decided already.) `ready` is when the inputs of an action arrive, `row_of`
    its row in the list; `held_after` has, per row, the bytes held after it if the list were
    followed from now on. `done` counts per queue; the columns from `head` to `span` are per rank.
    """
    # One function: split into looking, choosing and running, which share these columns, it took
    # twelve times as long compiled, and about twice as long as plain Python.
    microbatches, stages = columns.microbatches, columns.stages
    first, queues, holder = columns.first, columns.queues, columns.holder
    change, capacity, seconds = columns.change, columns.capacity, columns.seconds
    follower, lag = columns.follower, columns.lag
    patience, overrun, allowance, is_late = policy
    num_rows, num_ranks = len(listed), len(capacity)
    follow = follow_list(columns, listed)
    row_of, held_after = follow.row_of, follow.held_after
    ready = filled(num_rows, inf)
    for number in range(microbatches):
        ready[number] = 0.0
    is_done, done = filled(num_rows, False), filled(3 * stages, 0)
    head, position, is_waiting = (
        filled(num_ranks, 0),
        filled(num_ranks, 0),
        filled(num_ranks, False),
    )
    clock, held, busy = filled(num_ranks, 0.0), filled(num_ranks, 0.0), filled(num_ranks, 0.0)
    order, start, span = filled(num_rows, 0), filled(num_rows, 0.0), filled(num_ranks, 0.0)
    for rank in range(num_ranks):
        head[rank] = position[rank] = first[rank] * microbatches
    left = num_rows if follow.fits else 0
    while left > 0:
        rank = 0
        for other in range(1, num_ranks):
            if clock[other] < clock[rank]:
                rank = other
        now = clock[rank]
        if now == inf:
            return Finish(order, start, span, False)

        # What could run now, which W could, and what becomes ready next; lower rows go first.
        best = weight = -1
        best_row = weight_row = next_row = num_rows
        coming = inf
        has_forward = False
        for slot in range(first[rank], first[rank + 1]):
            queue = queues[slot]
            if done[queue] == microbatches:
                continue
            entry = queue * microbatches + done[queue]
            row = row_of[entry]
            has_forward |= queue < stages
            if queue >= 2 * stages:
                if ready[entry] <= now and row < weight_row:
                    weight = queue
                    weight_row = row
            elif ready[entry] > now:
                if ready[entry] < coming:
                    coming = ready[entry]
                    next_row = row
            elif row < best_row:
                most = capacity[rank] - change[entry]
                overtaken = head[rank]
                if change[entry] > 0:
                    if held[rank] > most:
                        continue
                    while overtaken < row and held_after[overtaken] <= most:
                        overtaken += 1
                    if overtaken < row:
                        continue
                best = queue
                best_row = row

        # Choose: a W that is next in the list, the first that can run, a W in a gap, or nothing.
        lost = coming - busy[rank] - span[rank]
        may_wait = position[rank] == first[rank] * microbatches or lost <= allowance
        is_short = False
        if weight >= 0:
            length = seconds[weight * microbatches + done[weight]]
            is_short = now + (1 - overrun) * length <= coming
        chosen = best
        if weight >= 0 and weight_row == head[rank] and (has_forward or not is_late):
            chosen = weight
        elif best >= 0:
            if may_wait and next_row < best_row:
                length = seconds[best * microbatches + done[best]]
                if coming < now + patience * length:
                    chosen = weight if is_short else -1
        elif weight >= 0 and (is_short or not may_wait):
            chosen = weight
        if chosen < 0:
            clock[rank] = coming
            is_waiting[rank] = True
            continue

        # Run it, pass its result on, and keep the bytes of the list up to date.
        entry = chosen * microbatches + done[chosen]
        end = now + seconds[entry]
        if position[rank] == first[rank] * microbatches:
            span[rank] = now
        is_waiting[rank] = False
        clock[rank] = end
        busy[rank] += seconds[entry]
        held[rank] += change[entry]
        start[entry] = now
        order[position[rank]] = chosen
        position[rank] += 1
        if stages <= chosen < 2 * stages:
            ready[entry + stages * microbatches] = end
        if follower[chosen] >= 0:
            waiting = holder[follower[chosen]]
            arrival = end + lag[entry]
            ready[follower[chosen] * microbatches + done[chosen]] = arrival
            if is_waiting[waiting] and arrival < clock[waiting]:
                clock[waiting] = arrival
        done[chosen] += 1
        row = row_of[entry]
        is_done[row] = True
        for overtaken in range(head[rank], row):
            held_after[overtaken] += change[entry]
        last = first[rank + 1] * microbatches
        while head[rank] < last and is_done[head[rank]]:
            head[rank] += 1
        if position[rank] == last:
            span[rank] = end - (span[rank] if columns.counts_from_start else 0.0)
            span[rank] += columns.extra[rank]
            clock[rank] = inf
        left -= 1
    return Finish(order, start, span, follow.fits)
