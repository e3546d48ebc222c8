"""Costs read off a timeline that was recorded: what a stage's actions took on the average."""

import numpy as np

from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.ir.graph import build_graph
from penstock.ir.rows import Floats
from penstock.sim.timeline import Timeline

__all__ = ["costs_of"]


def costs_of(timeline: Timeline) -> Costs:
    """The mean seconds per stage of every kind of compute, of a send, and of a transfer.

    A kind that a stage never runs costs nothing. A transfer is what the fastest message took,
    since others were there before anybody waited for them.

    >>> from penstock.assembly import build
    >>> from penstock.sim.engine import simulate
    >>> schedule = build("ZB-H1", ranks=2, microbatches=4)
    >>> costs_of(simulate(schedule, Costs(forward=[2, 3]))).forward
    (2.0, 3.0)
    """
    return Costs(
        forward=_mean_seconds(timeline, Kind.FORWARD).tolist(),
        backward_input=_mean_seconds(timeline, Kind.BACKWARD_INPUT).tolist(),
        backward_weight=_mean_seconds(timeline, Kind.BACKWARD_WEIGHT).tolist(),
        full_backward=_mean_seconds(timeline, Kind.FULL_BACKWARD).tolist(),
        send=_mean_send_seconds(timeline),
        transfer=_transfer_seconds(timeline),
    )


def _mean_seconds(timeline: Timeline, kind: Kind) -> Floats:
    rows, stages = timeline.schedule.rows, timeline.schedule.num_stages
    wanted = rows.is_kind(kind)
    seconds = (timeline.end - timeline.start)[wanted]
    total = np.bincount(rows.stage[wanted], weights=seconds, minlength=stages)
    count = np.bincount(rows.stage[wanted], minlength=stages)
    mean: Floats = total / np.maximum(count, 1)
    return mean


def _mean_send_seconds(timeline: Timeline) -> float:
    sends = timeline.schedule.rows.is_kind(Kind.SEND_F, Kind.SEND_B)
    return float((timeline.end - timeline.start)[sends].mean()) if sends.any() else 0.0


def _transfer_seconds(timeline: Timeline) -> float:
    """From the end of a send to the start of the work that uses what was sent."""
    graph, rows = build_graph(timeline.schedule), timeline.schedule.rows
    user = np.repeat(np.arange(len(rows)), np.diff(graph.first))
    is_send = rows.is_kind(Kind.SEND_F, Kind.SEND_B)[graph.need]
    waits = timeline.start[user[is_send]] - timeline.end[graph.need[is_send]]
    return max(0.0, float(waits.min())) if len(waits) else 0.0
