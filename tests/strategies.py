"""What property tests draw from: families in all their sizes, dataflows with skips, costs."""

from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from penstock.assembly import build
from penstock.checks.report import find_problems
from penstock.costs import Costs
from penstock.errors import SizeError
from penstock.ir.dataflow import Dataflow
from penstock.ir.lookup import find_rows
from penstock.ir.rows import ABSENT
from penstock.ir.schedule import Schedule
from penstock.passes.saved import add_offload, add_recompute
from penstock.schedules.registry import FAMILIES

__all__ = [
    "FAMILY_NAMES",
    "costs",
    "dag_schedules",
    "every_family",
    "examples",
    "join_at",
    "schedules",
    "with_memory_actions",
    "with_overlaps",
]

# As they are before any test registers one of its own.
FAMILY_NAMES = tuple(FAMILIES)


def examples(count: int) -> int:
    """Return how many examples to draw: `count` in `make test-all`, by default its share."""
    return max(1, count * settings().max_examples // 100)


def every_family(ranks: int, microbatches: int) -> list[Schedule]:
    """One schedule of every family that has this size."""
    found = []
    for name in FAMILY_NAMES:
        try:
            found.append(build(name, ranks=ranks, microbatches=microbatches))
        except SizeError:
            continue
    return found


@st.composite
def schedules(
    draw: st.DrawFn,
    *,
    max_ranks: int = 8,
    max_microbatches: int = 16,
    max_stages_per_rank: int = 3,
) -> Schedule:
    """Any family in any size that it has."""
    name = draw(st.sampled_from(FAMILY_NAMES))
    ranks = draw(st.integers(1, max_ranks))
    microbatches = draw(st.integers(1, max_microbatches))
    if name == "DualPipe":
        ranks, microbatches = ranks + ranks % 2, max(2, microbatches)
    stages_per_rank = None
    if name in ("ForwardOnly", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"):
        stages_per_rank = draw(st.integers(1, max_stages_per_rank))
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


@st.composite
def dag_schedules(draw: st.DrawFn, *, max_ranks: int = 5, max_microbatches: int = 6) -> Schedule:
    """A family that is built for a chain, run on a model that also has skips.

    A chain already makes every stage wait for all before it, so any skip keeps the order possible.
    """
    chains = schedules(max_ranks=max_ranks, max_microbatches=max_microbatches)
    schedule = draw(chains.filter(lambda schedule: schedule.dataflow.is_chain))
    stages = schedule.num_stages
    pairs = [(p, c) for p in range(stages) for c in range(p + 2, stages)]
    skips = draw(st.lists(st.sampled_from(pairs), max_size=5)) if pairs else []
    return replace(schedule, dataflow=Dataflow(stages, [*schedule.dataflow.edges, *skips]))


@st.composite
def with_memory_actions(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """The same order, with some of what its forwards save recomputed or offloaded."""
    stage, microbatch = np.nonzero(find_rows(schedule).backward_input != ABSENT)
    pairs = list(zip(stage.tolist(), microbatch.tolist(), strict=True))
    choices = draw(st.lists(st.integers(0, 2), min_size=len(pairs), max_size=len(pairs)))
    chosen = [[p for p, c in zip(pairs, choices, strict=True) if c == kind] for kind in (1, 2)]
    schedule = add_recompute(schedule, chosen[0])
    behind, ahead = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return add_offload(schedule, chosen[1], behind=behind, ahead=ahead)


def join_at(schedule: Schedule, row: int) -> Schedule:
    """Overlap a row with the one before it, or return the schedule as it is if they cannot be."""
    rows = schedule.rows
    if row in rows.first or not rows.is_compute[row - 1 : row + 1].all():
        return schedule
    joined = rows.joined.copy()
    joined[row] = True
    attempt = replace(schedule, rows=replace(rows, joined=joined))
    return schedule if find_problems(attempt) else attempt


@st.composite
def with_overlaps(draw: st.DrawFn, schedule: Schedule, *, most: int = 8) -> Schedule:
    """The same order, with some neighbours of each rank overlapped: any two that allow it."""
    last = len(schedule.rows) - 1
    for row in draw(st.lists(st.integers(1, last), max_size=most)) if last else []:
        schedule = join_at(schedule, row)
    return schedule


@st.composite
def costs(draw: st.DrawFn, schedule: Schedule, *, least: float = 0.125) -> Costs:
    """Costs per stage and link, in eighths of a second so that sums are exact."""

    def seconds(low: float) -> st.SearchStrategy[float]:
        return st.integers(round(low * 8), 32).map(lambda eighths: eighths / 8)

    stages, ranks = schedule.num_stages, schedule.num_ranks

    def per_stage() -> list[float]:
        return draw(st.lists(seconds(least), min_size=stages, max_size=stages))

    row = st.lists(seconds(0.0), min_size=ranks, max_size=ranks)
    return Costs(
        forward=per_stage(),
        backward_input=per_stage(),
        backward_weight=per_stage(),
        transfer=draw(st.lists(row, min_size=ranks, max_size=ranks)),
    )
