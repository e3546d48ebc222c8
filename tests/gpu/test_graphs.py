"""Stages that are captured as CUDA graphs or compiled, in one process and between ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from tests.gpu.problems import EQUAL, TRAINING, Twin, closing, make_batch, make_blocks, widths_of
from tests.models import make_stages, mean_loss
from tests.processes import Processes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", TRAINING)
def test_captured_stages_have_the_gradients_of_the_unsplit_model(family: str) -> None:
    device = torch.device("cuda", 0)
    blocks = make_blocks(widths_of(8, are_equal=False), device)
    twin = Twin.of(nn.Sequential(*blocks))
    pipeline = ps.Pipeline(
        make_stages(family, 2, blocks),
        family,
        microbatches=4,
        loss=mean_loss,
        device=device,
        options=ps.RunOptions(cuda_graphs=True),
    )
    # Weights change in every step, shapes in some.
    for number, rows in enumerate([8, 8, 8, 16, 16, 16, 8, 8]):
        assert twin.step(pipeline, *make_batch((rows, EQUAL), number, device)) == {}, number


def train_captured(
    rank: int, device: torch.device, is_captured: bool
) -> dict[str, dict[str, float]]:
    del rank
    wrong = {}
    for family in ("1F1B", "Interleaved1F1B", "ZBV"):
        blocks = make_blocks(widths_of(8, are_equal=False), device)
        twin = Twin.of(nn.Sequential(*blocks))
        pipeline = ps.Pipeline(
            make_stages(family, 2, blocks),
            family,
            microbatches=4,
            loss=mean_loss,
            group=dist.group.WORLD,
            device=device,
            options=ps.RunOptions(cuda_graphs=is_captured),
        )
        with closing(pipeline):
            for number, rows in enumerate([8, 8, 8, 16, 16, 16, 8, 8]):
                if far := twin.step(pipeline, *make_batch((rows, EQUAL), number, device)):
                    wrong[f"{family}, step {number}"] = far
    return wrong


def test_captured_stages_on_two_ranks_are_exact_in_every_step(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    is_captured = accelerator.type == "cuda"
    assert two_ranks.run(train_captured, accelerator, is_captured, seconds=120.0) == [{}] * 2


def train_compiled(rank: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Stages whose graphs are taken apart as the compiler would have them, but run as they are."""
    del rank
    wrong = {}
    for family in ("1F1B", "ZBV"):
        torch._dynamo.reset()
        blocks = make_blocks(widths_of(8, are_equal=False), device)
        twin = Twin.of(nn.Sequential(*blocks))
        stages = make_stages(family, 2, blocks)
        for stage in stages:
            stage.compile(backend="aot_eager")
        pipeline = ps.Pipeline(
            stages,
            family,
            microbatches=4,
            loss=mean_loss,
            group=dist.group.WORLD,
            device=device,
        )
        with closing(pipeline):
            for number in range(3):
                if far := twin.step(pipeline, *make_batch((8, EQUAL), number, device)):
                    wrong[f"{family}, step {number}"] = far
    return wrong


def test_compiled_stages_on_two_ranks_are_exact_in_every_step(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    assert two_ranks.run(train_compiled, accelerator, seconds=150.0) == [{}] * 2


def capture_a_step(rank: int, device: torch.device) -> list[str]:
    """What a rank is told that captures a step, and that the step after it is exact."""
    del rank
    blocks = make_blocks(widths_of(2, are_equal=True), device)
    twin = Twin.of(nn.Sequential(*blocks))
    pipeline = ps.Pipeline(
        make_stages("1F1B", 2, blocks),
        "1F1B",
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD,
        device=device,
        options=ps.RunOptions(compare_data=False),
    )
    told = []
    with closing(pipeline):
        batch, target = make_batch((8, EQUAL), 0, device)
        assert twin.step(pipeline, batch, target) == {}
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with pytest.raises(ps.errors.BatchError) as caught, torch.cuda.graph(graph):
                pipeline.step(batch, target=target)
            told.append(str(caught.value))
        assert twin.step(pipeline, batch, target) == {}
    return told


def test_a_step_of_several_ranks_cannot_be_captured(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    for told in two_ranks.run(capture_a_step, accelerator):
        if accelerator.type == "cuda":
            assert "must not be captured as a CUDA graph" in told[0]
