"""DeepSeek-V3: the bubble of DualPipe in a training step on 2,048 H800.

Insights into DeepSeek-V3: Scaling Challenges and Reflections on Hardware for AI Architectures,
table 4 (column MPFT), https://arxiv.org/abs/2505.09343. Pipeline ranks, sequences of a step and
their length: DeepSeek-V3 Technical Report, https://arxiv.org/abs/2412.19437
"""

from dataclasses import dataclass

import numpy as np

from docs_build.published.table import Table, percent
from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate

GPUS, RANKS, SEQUENCES = 2048, 16, 15_360
# Seconds in a step: forwards alone, backwards alone (some only for inputs), weight backwards
# alone, overlapped pairs of a forward and a backward, bubble, optimizer, and the whole.
FORWARD, BACKWARD, WEIGHT, PAIRS = 1.13, 1.99, 0.48, 13.95
BUBBLE, OPTIMIZER, STEP = 2.06, 0.29, 19.926


@dataclass(frozen=True, slots=True)
class Counts:
    """How many actions a rank runs alone by kind, and how many overlapped pairs; a mean."""

    forward: float
    full_backward: float
    backward_input: float
    backward_weight: float
    pairs: float


def count(schedule: Schedule) -> Counts:
    """Return the mean over ranks."""
    rows, alone = schedule.rows, ~schedule.rows.in_overlap()
    kinds = (Kind.FORWARD, Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    numbers = [int((alone & rows.is_kind(kind)).sum()) for kind in kinds]
    return Counts(*(number / RANKS for number in (*numbers, int(rows.joined.sum()))))


def price(found: Counts) -> Costs:
    """Return the seconds of single actions, from those of all actions of a kind in a step."""
    forward = FORWARD / found.forward
    weight = WEIGHT / found.backward_weight
    # A backward for inputs alone is a full one without the part for weights.
    number = found.full_backward + found.backward_input
    full = (BACKWARD + found.backward_input * weight) / number
    saved = forward + full - PAIRS / found.pairs
    return Costs(
        forward=forward,
        backward_input=full - weight,
        backward_weight=weight,
        full_backward=full,
        overlap_gain=float(np.clip(saved / min(forward, full), 0, 1)),
    )


def table() -> Table:
    """Predict the bubble from the work, and compare both with the published ones."""
    microbatches = SEQUENCES * RANKS // GPUS
    schedule = build("DualPipe", ranks=RANKS, microbatches=microbatches)
    timeline = simulate(schedule, price(count(schedule)))
    bubble = float(np.mean(timeline.idle_seconds))
    work = FORWARD + BACKWARD + WEIGHT + PAIRS
    step = STEP - OPTIMIZER
    rows = [
        ["work of a rank s", f"{work:.2f}", f"{np.mean(timeline.busy_seconds):.2f}"],
        ["bubble of a rank s", f"{BUBBLE:.2f}", f"{bubble:.2f}"],
        ["step without the optimizer s", f"{step:.2f}", f"{timeline.end_time:.2f}"],
        ["bubble / step", f"{BUBBLE / step:.1%}", f"{timeline.bubble_rate:.1%}"],
    ]
    values = [(work, float(np.mean(timeline.busy_seconds))), (BUBBLE, bubble)]
    values += [(step, timeline.end_time), (BUBBLE / step, timeline.bubble_rate)]
    errors = [percent(predicted / published - 1) for published, predicted in values]
    above = timeline.end_time / max(timeline.busy_seconds) - 1
    lines = [
        [*(cell.replace("%", " %") for cell in cells), error]
        for cells, error in zip(rows, errors, strict=True)
    ]
    lines.append(["DualPipe above the work of its busiest rank", "", "", percent(above)])
    return Table(("", "published", "predicted", "error"), lines)
