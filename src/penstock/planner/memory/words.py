"""What recomputing and offloading buy, in words: bytes saved, and what they cost."""

from dataclasses import replace

import numpy as np

from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate
from penstock.sim.period import Boundary
from penstock.sim.timeline import Timeline
from penstock.units import format_bytes, format_share

__all__ = ["describe_memory_actions"]

# The action that is counted, those that go with it, and the word for it.
_MEANS = (
    (Kind.RECOMPUTE, (Kind.RECOMPUTE,), "recomputing"),
    (Kind.OFFLOAD, (Kind.OFFLOAD, Kind.RELOAD), "offloading"),
)


def describe_memory_actions(timeline: Timeline, costs: Costs, boundary: Boundary) -> list[str]:
    """Return a line for each means: how many forwards, on which ranks, and what that buys.

    What it buys is the difference to the same order without it.
    """
    schedule = timeline.schedule
    lines = []
    for counted, kinds, word in _MEANS:
        found = schedule.rows.is_kind(counted)
        if not found.any():
            continue
        rows = schedule.rows.rank_of_row()[found]
        ranks = np.unique(rows).tolist()
        other = simulate(_without(schedule, kinds), costs)
        saved = np.array(other.rank_peak_bytes) - np.array(timeline.rank_peak_bytes)
        before, after = other.period(boundary), timeline.period(boundary)
        share = (after - before) / before if before else 0.0
        is_there = np.isin(schedule.rows.rank_of_row(), ranks)
        forwards = int((schedule.rows.is_kind(Kind.FORWARD) & is_there).sum())
        lines.append(
            f"{word} {len(rows)} of {forwards} forwards on rank{'s' * (len(ranks) > 1)} "
            f"{' '.join(map(str, ranks))} saves up to {format_bytes(max(0.0, saved.max()))} a "
            f"rank for {format_share(share)} of a step"
        )
    return lines


def _without(schedule: Schedule, kinds: tuple[Kind, ...]) -> Schedule:
    return replace(schedule, rows=schedule.rows.keep(~schedule.rows.is_kind(*kinds)))
