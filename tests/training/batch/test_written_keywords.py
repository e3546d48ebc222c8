"""A stage that writes to a keyword, where stages of other ranks get the same."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import PipelineError
from tests.models import WIDTH, make_batch, mean_loss
from tests.processes import Processes

BATCH, TARGET = make_batch(8)
MASK = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)[:, None]


class Masked(nn.Module):
    """Multiplies by a mask, which it may write to before."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.writes = writes

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.writes:
            mask.mul_(2)
        result: torch.Tensor = self.layer(x) * mask.clone()
        return result


class Plain(nn.Module):
    """Takes no keyword."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def make_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Masked(writes=False), Masked(writes=True), Masked(writes=False)]


def test_later_stages_of_one_process_see_what_was_written() -> None:
    stages = make_stages()
    x, mask = BATCH, MASK.clone()
    for stage in deepcopy(stages):
        x = stage(x, mask)
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=4, loss=mean_loss)
    result = pipeline.step(BATCH, mask=MASK.clone(), target=TARGET)
    assert result.loss == pytest.approx(mean_loss(x, TARGET).item(), abs=1e-12)


def take_steps(rank: int) -> list[str]:
    """Return what a step and an evaluation raise; a keyword of one stage alone raises nothing."""
    del rank
    raised = []
    stages = [*make_stages(), Plain()]
    with ps.Pipeline(
        stages, "Interleaved1F1B", microbatches=4, loss=mean_loss, group=dist.group.WORLD
    ) as pipeline:
        for run in (pipeline.step, pipeline.evaluate):
            with pytest.raises(PipelineError) as caught:
                run(BATCH, mask=MASK.clone(), target=TARGET)
            raised.append(str(caught.value).split("\n")[0])
    stages = [Plain(), Masked(writes=True)]
    with ps.Pipeline(
        stages, "1F1B", microbatches=4, loss=mean_loss, group=dist.group.WORLD
    ) as pipeline:
        pipeline.step(BATCH, mask=MASK.clone(), target=TARGET)
    return raised


def test_a_keyword_that_other_ranks_get_too_must_not_be_written_to(
    two_processes: Processes,
) -> None:
    # Each rank has a batch of its own, so stages of others computed with what was not written.
    words = (
        "rank 1: BatchError: a keyword that stages of several ranks take must not be written to "
        "in place (got 'mask', to which stage 1 or another one of its rank writes); write to a "
        "copy, and send it on to the stages that need it"
    )
    assert two_processes.run(take_steps) == [[words, words]] * 2
