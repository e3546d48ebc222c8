"""In which order the messages of shared wires are ready, if all ranks begin a step together.

    rank 0  |0F0|0F1|              both messages go over one wire: that of 0F0 is ready first, and
    rank 2  |  2F0  |              that of 2F0 waits until the wire has carried it
    wire       |0F0|2F0|0F1|

Messages are taken by the time at which they are ready. Whatever has not started by then waits for
one that is ready later, so no message is overtaken by one that is not known yet.
"""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from penstock.costs import Prices
from penstock.ir.graph import Graph
from penstock.ir.rows import Bools, Floats, Rows

__all__ = ["order_messages"]


def order_messages(
    rows: Rows,
    graph: Graph,
    prices: Prices,
    wire: NDArray[np.int64],
    is_second: Bools,
    seconds: Floats,
) -> NDArray[np.int64]:
    """Return the needs that wires carry, in the order in which they are ready.

    `wire` and `seconds` are per need: the wire that carries it (0 for none), and for how long. Of
    a message that has both its receive and its send as needs, only the first is returned.
    """
    run = _Events(rows, graph, prices, wire, is_second)
    queue: list[tuple[float, int]] = []
    free: dict[int, float] = {}
    found: list[int] = []
    run.advance(range(rows.num_ranks), queue)
    while queue:
        moment, slot = heappop(queue)
        arrival = max(moment, free.get(int(wire[slot]), 0.0)) + float(seconds[slot])
        free[int(wire[slot])] = arrival
        found.append(slot)
        run.arrive(slot, arrival, queue)
    return np.array(found, dtype=np.int64)


class _Events:
    """Ranks that run as far as they can; messages on wires arrive when the caller says so."""

    def __init__(
        self,
        rows: Rows,
        graph: Graph,
        prices: Prices,
        wire: NDArray[np.int64],
        is_second: Bools,
    ) -> None:
        self._first, self._joined = rows.first.tolist(), rows.joined.tolist()
        self._first_need, self._need = graph.first.tolist(), graph.need.tolist()
        self._lag, self._duration = prices.lag.tolist(), prices.duration.tolist()
        self._busy = prices.busy.tolist()
        self._is_carried, self._is_second = (wire > 0).tolist(), is_second.tolist()
        self._start: list[float | None] = [None] * len(rows)
        self._arrival: dict[int, float] = {}
        self._position, self._clock = self._first[:-1], [0.0] * rows.num_ranks
        self._waiting: dict[int, list[int]] = {}
        self._carried_from: dict[int, list[int]] = {}
        for slot in np.flatnonzero(wire > 0).tolist():
            self._carried_from.setdefault(self._need[slot], []).append(slot)
        rank_of_row = rows.rank_of_row().tolist()
        user = np.repeat(np.arange(len(rows)), np.diff(graph.first)).tolist()
        self._user_rank = [rank_of_row[row] for row in user]

    def arrive(self, slot: int, moment: float, queue: list[tuple[float, int]]) -> None:
        """Note that a message has arrived, and let its rank continue."""
        self._arrival[slot] = moment
        self.advance([self._user_rank[slot]], queue)

    def advance(self, ranks: "range | list[int]", queue: list[tuple[float, int]]) -> None:
        """Run these ranks, and those that wait for what they do, until all must wait."""
        ready = list(ranks)
        while ready:
            rank = ready.pop()
            while self._position[rank] < self._first[rank + 1]:
                row = self._position[rank]
                end = row + 1
                while end < self._first[rank + 1] and self._joined[end]:
                    end += 1
                moment = self._find_start(rank, row, end)
                if moment is None:
                    break
                self._position[rank] = end
                self._clock[rank] = moment + self._busy[row]
                for member in range(row, end):
                    self._start[member] = moment
                    ready += self._waiting.pop(member, [])
                for member in range(row, end):
                    for slot in self._carried_from.get(member, ()):
                        self._send(slot, queue)

    def _find_start(self, rank: int, row: int, end: int) -> float | None:
        """Return when a piece of work starts, or None if something that it needs is unknown."""
        moment = self._clock[rank]
        for slot in range(self._first_need[row], self._first_need[end]):
            if self._is_carried[slot]:
                message = slot - self._is_second[slot]
                if message not in self._arrival:
                    return None
                moment = max(moment, self._arrival[message])
                continue
            other = self._need[slot]
            before = self._start[other]
            if before is None:
                self._waiting.setdefault(other, []).append(rank)
                return None
            moment = max(moment, before + self._duration[other] + self._lag[slot])
        return moment

    def _send(self, slot: int, queue: list[tuple[float, int]]) -> None:
        """Queue a message if all that it waits for has started."""
        message = slot - self._is_second[slot]
        both = [message, message + 1] if message + 1 < len(self._need) else [message]
        parts = [part for part in both if part == message or self._is_second[part]]
        moments = []
        for part in parts:
            start = self._start[self._need[part]]
            if start is None:
                return
            moments.append(start + self._duration[self._need[part]] + self._lag[part])
        heappush(queue, (max(moments), message))
