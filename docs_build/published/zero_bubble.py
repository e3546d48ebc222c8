"""Zero Bubble Pipeline Parallelism: samples per GPU and second of four schedules.

Zero Bubble Pipeline Parallelism, tables 3 and 4, https://arxiv.org/abs/2401.10241
"""

from dataclasses import replace

from docs_build.published.table import Table, percent
from penstock.assembly import build
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.sim.engine import simulate
from tests.facts import ZERO_BUBBLE, ZeroBubbleRow
from tests.planner.problems import published_problem

# By model: samples of a microbatch, and chunks of a rank in the interleaved schedule (a layer
# each).
SIZES = {"1.5B": (6, 3), "6.2B": (3, 4), "14.6B": (1, 3), "28.3B": (1, 2)}
# By model and microbatches: 1F1B, interleaved 1F1B, ZB-1p, ZB-2p.
PUBLISHED = {
    ("1.5B", 24): (11.8, 13.1, 12.9, 14.5),
    ("1.5B", 32): (12.5, 13.4, 13.4, 14.8),
    ("1.5B", 64): (13.6, 13.9, 14.2, 14.9),
    ("6.2B", 24): (3.50, 4.01, 3.88, 4.32),
    ("6.2B", 32): (3.70, 4.08, 4.00, 4.35),
    ("6.2B", 64): (4.03, 4.19, 4.20, 4.39),
    ("14.6B", 48): (1.40, 1.54, 1.61, 1.81),
    ("14.6B", 64): (1.49, 1.59, 1.67, 1.83),
    ("14.6B", 128): (1.64, 1.66, 1.76, 1.85),
    ("28.3B", 96): (0.76, 0.82, 0.87, 0.99),
    ("28.3B", 128): (0.80, 0.85, 0.90, 1.00),
    ("28.3B", 256): (0.88, 0.90, 0.96, 1.00),
}


def spans(row: ZeroBubbleRow) -> tuple[tuple[float, ...], float]:
    """Return the seconds of the four schedules, and the bound for the memory of ZB-1p.

    The order of ZB-2p is not published: it is taken to be at the bound for its memory.
    """
    loop = Placement.loop(row.ranks)
    tight, wide = (
        published_problem(row, loop, activations=factor * row.ranks) for factor in (1, 2)
    )
    # A number in costs is one rank's share, which is what the paper measured.
    shares = replace(
        tight.costs,
        forward=row.forward,
        backward_input=row.backward_input,
        backward_weight=row.backward_weight,
        activation_bytes=0.0,
        weight_stash_bytes=0.0,
    )
    interleaved = build(
        "Interleaved1F1B",
        ranks=row.ranks,
        microbatches=row.microbatches,
        stages_per_rank=SIZES[row.model][1],
    )
    plain, ours = (
        build(name, ranks=row.ranks, microbatches=row.microbatches) for name in ("1F1B", "ZB-H1")
    )
    simulated = [
        simulate(schedule, shares).longest_span for schedule in (plain, interleaved, ours)
    ]
    found = (*simulated, lower_bound(wide))
    return tuple(milliseconds / 1e3 for milliseconds in found), lower_bound(tight) / 1e3


def table() -> Table:
    """Predict samples per second of 1F1B, and the other schedules relative to it."""
    models = {row.model: row for row in ZERO_BUBBLE}
    rows = []
    for (model, microbatches), published in PUBLISHED.items():
        row = replace(models[model], microbatches=microbatches)
        seconds, bound = spans(row)
        samples = microbatches * SIZES[model][0] / row.ranks
        predicted = samples / seconds[0]
        cells = [model, f"{row.ranks} x {microbatches}", f"{published[0]:g}", f"{predicted:.3g}"]
        cells.append(percent(predicted / published[0] - 1))
        for rate, taken in zip(published[1:], seconds[1:], strict=True):
            measured, ratio = rate / published[0], seconds[0] / taken
            cells.append(f"{measured:.3f} / {ratio:.3f} ({percent(ratio / measured - 1)})")
        cells += [percent(seconds[number] / bound - 1) for number in (0, 2)]
        rows.append(cells)
    headings = (
        "model",
        "ranks x microbatches",
        "1F1B, samples/s",
        "predicted",
        "error",
        "interleaved / 1F1B: measured / predicted",
        "ZB-1p / 1F1B",
        "ZB-2p (at its bound) / 1F1B",
        "1F1B above the bound",
        "ZB-1p above it",
    )
    return Table(headings, rows)
