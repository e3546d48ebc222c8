"""What the pieces of the model cost here: all ranks measure at once, as they will train."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch.distributed as dist

from penstock.costs import Costs
from penstock.measuring.links import measure_links
from penstock.measuring.stability import MeasurementWarning
from penstock.measuring.stages import measure_closely
from penstock.tools.demo.rank import LONGEST_SILENCE
from penstock.tools.demo.task import (
    Task,
    choose_device,
    draw_batches,
    make_optimizer,
    make_stages,
)
from penstock.tools.launcher import Report, run_on_ranks
from penstock.tools.verify.gpt import next_token_loss

__all__ = ["MeasuredTask", "measure_task"]

_SAMPLES = 5
# The kinds of backward are measured one after the other, and a machine may be slower a second
# later, so that everything is measured several times.
_REPEATS = 3
_SECONDS = ("forward", "backward_input", "backward_weight", "full_backward")


@dataclass(frozen=True, slots=True)
class MeasuredTask:
    """The costs of one microbatch in every piece, and how reliable their seconds are.

    `spread` is the median, over all costs, of the interquartile range as a share of the median.
    """

    costs: Costs
    spread: float


def measure_task(task: Task) -> MeasuredTask:
    """Measure the pieces of a task in one local process per rank."""
    found: MeasuredTask = run_on_ranks(
        partial(_measure, task), task.ranks, seconds=LONGEST_SILENCE
    )[0]
    return found


def _measure(task: Task, _report: Report) -> MeasuredTask:
    device = choose_device(task, dist.get_rank())
    pieces = [piece.to(device) for piece in make_stages(task, [1] * len(task.pieces))]
    batch = next(draw_batches(task, device))
    rows = task.rows // task.microbatches
    found = [
        measure_closely(
            pieces,
            example=(batch.tokens[:rows],),
            loss=next_token_loss,
            target=batch.target[:rows],
            repeats=_SAMPLES,
            device=device,
            optimizer=make_optimizer,
        )
        for _ in range(_REPEATS)
    ]
    costs = _middle([one.costs for one in found], len(pieces))
    spreads = [spread for one in found for column in one.spread.values() for spread in column]
    assert dist.group.WORLD is not None, "this process is in a group"
    with warnings.catch_warnings():
        # How reliable the seconds are is part of what the demo shows.
        warnings.simplefilter("ignore", MeasurementWarning)
        links = measure_links(dist.group.WORLD, device=device)
    return MeasuredTask(links.add_to(costs), median(spreads))


def _middle(found: Sequence[Costs], count: int) -> Costs:
    """Return the median seconds of several measurements; bytes do not vary."""
    seconds: dict[str, Any] = {
        name: np.median([costs.per_stage(name, count) for costs in found], axis=0).tolist()
        for name in _SECONDS
    }
    return replace(found[0], **seconds)
