"""Seconds of gathering parameters and reducing gradients, from recorded steps of sharded stages.

UNSHARD only starts to gather, and the first forward waits for the rest:

recorded    UNSHARD |---F of microbatch 0-------------|  |-F 1-|  |-F 2-|
            |-------|  what gathering takes   |---F---|
"""

from collections.abc import Sequence

import numpy as np

from penstock.ir.actions import Kind
from penstock.ir.rows import Floats
from penstock.sim.timeline import Timeline

__all__ = ["collective_seconds", "has_collectives"]


def has_collectives(timelines: Sequence[Timeline]) -> bool:
    """Return whether gradients were reduced in these steps, or parameters gathered."""
    return timelines[0].schedule.rows.has_kind(Kind.REDUCE_GRAD)


def collective_seconds(
    timelines: Sequence[Timeline], is_gathered: Sequence[bool]
) -> dict[str, list[Floats]]:
    """Return the samples of each collective, by name and stage: one per step.

    `is_gathered` says which stages have parameters to gather.
    """
    steps = [_of_step(timeline, is_gathered) for timeline in timelines]
    stages = range(len(is_gathered))
    return {
        name: [np.array([step[name][stage] for step in steps]) for stage in stages]
        for name in steps[0]
    }


def _of_step(timeline: Timeline, is_gathered: Sequence[bool]) -> dict[str, Floats]:
    """Return the seconds of each collective of one step, by name, for every stage."""
    rows, stages = timeline.schedule.rows, timeline.schedule.num_stages
    length = timeline.end - timeline.start

    def total(kind: Kind) -> Floats:
        is_kind = rows.is_kind(kind)
        return np.bincount(rows.stage[is_kind], length[is_kind], stages).astype(np.float64)

    waited = np.zeros(stages)
    for stage in range(stages):
        forward = length[rows.is_kind(Kind.FORWARD) & (rows.stage == stage)]
        if len(forward) > 1:
            waited[stage] = max(0.0, forward[0] - np.median(forward[1:]))
    return {
        "unshard": np.where(is_gathered, total(Kind.UNSHARD) + waited, 0.0),
        "reshard": np.where(is_gathered, total(Kind.RESHARD), 0.0),
        "reduce_grad": total(Kind.REDUCE_GRAD),
    }
