"""Outputs that cannot be joined end the step on every rank, and the next one works."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import PipelineError
from tests.processes import Processes

RAGGED = ps.Ready([torch.ones(2, 3, 4), torch.ones(2, 5, 4)])
EVEN = torch.ones(4, 3, 4)
MESSAGE = (
    "BatchError: outputs of shapes [(2, 3, 4), (2, 5, 4)] do not fit together along dimension 0; "
    "give Pipeline(merge=...) a function that joins them, or ask for no outputs"
)


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def make_pipeline(**settings: Any) -> ps.Pipeline:
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    return ps.Pipeline(stages, "1F1B", microbatches=2, loss=squares, **settings)


def ask_for_outputs(_: int) -> list[Any]:
    """Return what training and evaluation say, with outputs and without, and what comes after."""
    pipeline = make_pipeline(group=dist.group.WORLD)
    said: list[Any] = []
    for method in (pipeline.step, pipeline.evaluate):
        with pytest.raises(PipelineError) as caught:
            method(RAGGED, return_outputs=True)
        said.append(str(caught.value).splitlines()[0])
    for parameter in pipeline.parameters():
        parameter.grad = None
    said.append(pipeline.step(RAGGED).loss)
    said.append(pipeline.step(EVEN, return_outputs=True).outputs)
    return said


# Outputs were joined after the step had ended: the rank that has them raised, the others
# continued and waited for it in the next step.
def test_all_ranks_raise_if_one_cannot_join_its_outputs(
    two_processes: Processes,
) -> None:
    first, second = two_processes.run(ask_for_outputs)
    alone = make_pipeline()
    loss = alone.step(RAGGED).loss
    assert first[:3] == second[:3] == [f"rank 1: {MESSAGE}"] * 2 + [loss]
    assert first[3] is None
    assert torch.equal(second[3], alone.step(EVEN, return_outputs=True).outputs)


def test_a_function_that_merges_may_fail_like_a_stage() -> None:
    def refuse(_: list[torch.Tensor]) -> torch.Tensor:
        raise ZeroDivisionError("nothing to see")

    pipeline = make_pipeline(merge=refuse)
    with pytest.raises(PipelineError, match=r"^rank 0: ZeroDivisionError: nothing to see$"):
        pipeline.evaluate(EVEN)
    assert pipeline.evaluate(EVEN, return_outputs=False).outputs is None
