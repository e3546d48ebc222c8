"""How many messages are in flight at once between two ranks."""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import Kind
from penstock.ir.clock import run_in_order
from penstock.ir.graph import build_graph
from penstock.ir.schedule import Schedule

__all__ = ["messages_in_flight"]

# One message arrives while another is used.
_FEWEST = 2


def messages_in_flight(lowered: Schedule) -> dict[tuple[int, int], int]:
    """Return, for all ranks that exchange messages, how many have been sent but not used.

    Both directions of a pair are listed, source first. Each number is the largest during a step in
    which all work takes equally long and messages take no time, and at least two.

    >>> from penstock.assembly import build, lower
    >>> messages_in_flight(lower(build("GPipe", ranks=2, microbatches=4)))
    {(0, 1): 2, (1, 0): 2}
    """
    rows, graph = lowered.rows, build_graph(lowered)
    is_send = rows.is_kind(Kind.SEND_F, Kind.SEND_B)
    seconds = np.where(is_send | rows.is_kind(Kind.RECV_F, Kind.RECV_B), 0.0, 1.0)
    run = run_in_order(rows, graph, duration=seconds, busy=seconds, lag=np.zeros(len(graph.need)))
    user = np.repeat(np.arange(len(rows)), np.diff(graph.first))
    comes = is_send[graph.need] & (graph.link >= 0)
    sent, used, link = run.start[graph.need[comes]], run.start[user[comes]], graph.link[comes]
    found = {}
    for source, destination in _pairs(lowered):
        mine = link == source * lowered.num_ranks + destination
        found[source, destination] = max(_FEWEST, _most_at_once(sent[mine], used[mine]))
    return found


def _pairs(schedule: Schedule) -> list[tuple[int, int]]:
    """Return the ranks that exchange messages, in both directions."""
    holder = schedule.placement.rank_of_stage
    pairs = {(holder[a], holder[b]) for a, b in schedule.dataflow.edges if holder[a] != holder[b]}
    return sorted(pairs | {(b, a) for a, b in pairs})


def _most_at_once(begins: NDArray[np.float64], ends: NDArray[np.float64]) -> int:
    """Return how many intervals overlap at most; one that begins when another ends counts."""
    done = np.searchsorted(np.sort(ends), np.sort(begins), side="left")
    return int((np.arange(1, len(done) + 1) - done).max(initial=0))
