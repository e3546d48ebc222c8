"""From (kind, stage, microbatch) to the row of that action in a schedule."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import MEMORY_KINDS, Kind
from penstock.ir.rows import ABSENT
from penstock.ir.schedule import Schedule

__all__ = ["Lookup", "edge_of_row", "find_memory_rows", "find_rows"]


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Row of each action, or -1: compute by (stage, microbatch), messages by (edge, microbatch).

    A full backward is both in `backward_input` and in `backward_weight`. `edge` is, for
    every row, the edge of the dataflow that it communicates along, or -1.
    """

    forward: NDArray[np.int32]
    backward_input: NDArray[np.int32]
    backward_weight: NDArray[np.int32]
    send_forward: NDArray[np.int32]
    receive_forward: NDArray[np.int32]
    send_backward: NDArray[np.int32]
    receive_backward: NDArray[np.int32]
    edge: NDArray[np.int32]


def find_rows(schedule: Schedule) -> Lookup:
    """Index a schedule; of an action that appears twice, the last row counts."""
    rows = schedule.rows
    edges = edge_of_row(schedule)

    def locate(count: int, owner: NDArray[np.int32], *kinds: Kind) -> NDArray[np.int32]:
        table = np.full((count, schedule.microbatches), ABSENT, dtype=np.int32)
        found = np.flatnonzero(rows.is_kind(*kinds) & (owner != ABSENT)).astype(np.int32)
        table[owner[found], rows.microbatch[found]] = found
        return table

    num_stages, num_edges = schedule.num_stages, len(schedule.dataflow.edges)
    return Lookup(
        locate(num_stages, rows.stage, Kind.FORWARD),
        locate(num_stages, rows.stage, Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT),
        locate(num_stages, rows.stage, Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT),
        locate(num_edges, edges, Kind.SEND_F),
        locate(num_edges, edges, Kind.RECV_F),
        locate(num_edges, edges, Kind.SEND_B),
        locate(num_edges, edges, Kind.RECV_B),
        edges,
    )


def find_memory_rows(schedule: Schedule) -> dict[Kind, NDArray[np.int32]]:
    """Return the row of each RECOMPUTE, OFFLOAD and RELOAD by (stage, microbatch), or -1."""
    rows, tables = schedule.rows, {}
    for kind in MEMORY_KINDS:
        table = np.full((schedule.num_stages, schedule.microbatches), ABSENT, dtype=np.int32)
        found = np.flatnonzero(rows.kind == kind).astype(np.int32)
        table[rows.stage[found], rows.microbatch[found]] = found
        tables[kind] = table
    return tables


def edge_of_row(schedule: Schedule) -> NDArray[np.int32]:
    """Return, for every communication, the number of its edge in the dataflow.

    Other rows have -1, and so has a communication between stages that no edge joins.
    """
    rows, stages = schedule.rows, schedule.num_stages
    result = np.full(len(rows), ABSENT, dtype=np.int32)
    talks = np.flatnonzero(rows.is_kind(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B))
    if not len(talks) or not schedule.dataflow.edges:
        return result
    # An activation goes from producer to consumer: SEND_F and RECV_B are at the producer.
    at_producer = rows.is_kind(Kind.SEND_F, Kind.RECV_B)[talks]
    stage = rows.stage[talks].astype(np.int64)
    peer = rows.peer[talks].astype(np.int64)
    key = np.where(at_producer, stage * stages + peer, peer * stages + stage)
    known = np.array(
        [producer * stages + consumer for producer, consumer in schedule.dataflow.edges]
    )
    place = np.minimum(np.searchsorted(known, key), len(known) - 1)
    is_edge = (known[place] == key) & (peer >= 0) & (peer < stages) & (stage < stages)
    result[talks] = np.where(is_edge, place, ABSENT)
    return result
