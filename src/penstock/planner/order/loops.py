"""The two loops behind `orders.py`: putting work in line, and running the ranks.

They are written once, over plain sequences: few rows run on lists, many compiled by numba where
that is installed. A place is a lane times the microbatches plus a microbatch.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from math import inf
from typing import Any

__all__ = ["compile_loop", "line_up", "run_ranks", "should_compile"]


def should_compile(*, is_worth_loading: bool) -> bool:
    """Whether to use compiled loops: if they are loaded already, or can be and it is worth it."""
    is_loaded = compile_loop.cache_info().currsize > 0
    return is_loaded or (is_worth_loading and find_spec("numba") is not None)


@cache
def compile_loop(loop: Callable[..., bool]) -> Callable[..., bool]:
    """The same loop, compiled for arrays."""
    from numba import njit

    compiled: Callable[..., bool] = njit(cache=True)(loop)
    return compiled


def line_up(
    microbatches: int,
    stages: int,
    first: Any,
    lanes: Any,
    change: Any,
    room: Any,
    urgency: Any,
    line: Any,
) -> bool:
    """Put every rank's lanes in `line`; tell whether their bytes fit, each in its place."""
    row = 0
    for rank in range(len(room)):
        begin = first[rank]
        end = first[rank + 1]
        done = [0] * (end - begin)
        held = 0.0
        for _ in range((end - begin) * microbatches):
            chosen = weight = fitting = -1
            least = least_weight = least_fitting = inf
            for slot in range(begin, end):
                lane = lanes[slot]
                number = done[slot - begin]
                # I comes after F of its microbatch, W after I: the lane that stands before it.
                is_early = lane >= stages and number == done[slot - begin - 1]
                if number == microbatches or is_early:
                    continue
                value = urgency[lane * microbatches + number]
                if value < least:
                    chosen = slot
                    least = value
                if lane >= 2 * stages and value < least_weight:
                    weight = slot
                    least_weight = value
                if held + change[lane] <= room[rank] and value < least_fitting:
                    fitting = slot
                    least_fitting = value
            if held + change[lanes[chosen]] > room[rank]:
                chosen = weight if weight >= 0 else fitting
                if chosen < 0:
                    return False
            done[chosen - begin] += 1
            held += change[lanes[chosen]]
            line[row] = lanes[chosen]
            row += 1
    return True


def run_ranks(
    microbatches: int,
    stages: int,
    first: Any,
    lanes: Any,
    change: Any,
    room: Any,
    holder: Any,
    seconds: Any,
    follower: Any,
    lag: Any,
    line: Any,
    patience: float,
    overrun: float,
    allowance: float,
    is_late: bool,
    ready: Any,
    row_of: Any,
    held_after: Any,
    is_done: Any,
    done: Any,
    head: Any,
    position: Any,
    is_waiting: Any,
    clock: Any,
    held: Any,
    busy: Any,
    order: Any,
    start: Any,
    span: Any,
) -> bool:
    """Run all ranks, the earliest clock first; tell whether they get to the ends of their lines.

    `ready` is when each place's inputs are there, `row_of` its row in line. `held_after` has, per
    row, the bytes that are held after it if the line were followed from now on. `done` counts per
    lane. The columns from `head` to `busy` are per rank. All of them are written to, and so are
    the results: `order`, `start` and `span`.
    """
    num_ranks = len(room)
    for rank in range(num_ranks):
        head[rank] = position[rank] = first[rank] * microbatches
        total = 0.0
        for row in range(first[rank] * microbatches, first[rank + 1] * microbatches):
            lane = line[row]
            row_of[lane * microbatches + done[lane]] = row
            done[lane] += 1
            total += change[lane]
            held_after[row] = total
            if total > room[rank]:
                return False
    for lane in range(3 * stages):
        done[lane] = 0
    left = 3 * stages * microbatches
    while left > 0:
        rank = 0
        for other in range(1, num_ranks):
            if clock[other] < clock[rank]:
                rank = other
        now = clock[rank]
        if now == inf:
            return False

        # What could run now, what W there is, and what comes next; rows tell who goes first.
        best = weight = -1
        best_row = weight_row = next_row = len(line)
        coming = inf
        has_forward = False
        for slot in range(first[rank], first[rank + 1]):
            lane = lanes[slot]
            if done[lane] == microbatches:
                continue
            place = lane * microbatches + done[lane]
            row = row_of[place]
            has_forward |= lane < stages
            if lane >= 2 * stages:
                if ready[place] <= now and row < weight_row:
                    weight = lane
                    weight_row = row
            elif ready[place] > now:
                if ready[place] < coming:
                    coming = ready[place]
                    next_row = row
            elif row < best_row:
                most = room[rank] - change[lane]
                overtaken = head[rank]
                if change[lane] > 0:
                    if held[rank] > most:
                        continue
                    while overtaken < row and held_after[overtaken] <= most:
                        overtaken += 1
                    if overtaken < row:
                        continue
                best = lane
                best_row = row

        # What to do: a W whose turn it is, the first that can run, a W in a gap, or nothing.
        lost = coming - busy[rank] - span[rank]
        may_wait = position[rank] == first[rank] * microbatches or lost <= allowance
        is_short = weight >= 0 and now + (1 - overrun) * seconds[weight] <= coming
        chosen = best
        if weight >= 0 and weight_row == head[rank] and (has_forward or not is_late):
            chosen = weight
        elif best >= 0:
            if may_wait and next_row < best_row and coming < now + patience * seconds[best]:
                chosen = weight if is_short else -1
        elif weight >= 0 and (is_short or not may_wait):
            chosen = weight
        if chosen < 0:
            clock[rank] = coming
            is_waiting[rank] = True
            continue

        # Do it, tell those who wait for it, and keep the line's bytes up to date.
        place = chosen * microbatches + done[chosen]
        end = now + seconds[chosen]
        if position[rank] == first[rank] * microbatches:
            span[rank] = now
        is_waiting[rank] = False
        clock[rank] = end
        busy[rank] += seconds[chosen]
        held[rank] += change[chosen]
        start[place] = now
        order[position[rank]] = chosen
        position[rank] += 1
        if stages <= chosen < 2 * stages:
            ready[place + stages * microbatches] = end
        if follower[chosen] >= 0:
            waiting = holder[follower[chosen]]
            arrival = end + lag[chosen]
            ready[follower[chosen] * microbatches + done[chosen]] = arrival
            if is_waiting[waiting] and arrival < clock[waiting]:
                clock[waiting] = arrival
        done[chosen] += 1
        row = row_of[place]
        is_done[row] = True
        for overtaken in range(head[rank], row):
            held_after[overtaken] += change[chosen]
        last = first[rank + 1] * microbatches
        while head[rank] < last and is_done[head[rank]]:
            head[rank] += 1
        if position[rank] == last:
            span[rank] = end - span[rank]
            clock[rank] = inf
        left -= 1
    return True
