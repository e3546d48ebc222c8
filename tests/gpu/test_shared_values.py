"""A value that several stages of one rank need, on ranks that share a GPU."""

import pytest
import torch
import torch.distributed as dist

import penstock as ps
from penstock.training.options import TransportChoice
from tests.gpu.problems import Twin, closing
from tests.models import mean_loss
from tests.processes import Processes
from tests.splitting.dense import Dense, Way, split_dense
from tests.splitting.small import WIDTH, numbers

pytestmark = pytest.mark.gpu


def train(
    rank: int, way: Way, device: torch.device, transport: TransportChoice, is_captured: bool
) -> dict[str, dict[str, float]]:
    """Train with several schedules and shapes; return where gradients are not the model's."""
    del rank
    wrong: dict[str, dict[str, float]] = {}
    is_cuda = device.type == "cuda"
    for family in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"):
        torch.manual_seed(0)
        twin = Twin.of(Dense().to(device))
        stages = 2 * dist.get_world_size()
        pipe = split_dense(twin.model, way, stages, numbers(8, WIDTH).to(device))
        pipeline = ps.Pipeline(
            pipe,
            family,
            microbatches=4,
            loss=mean_loss,
            group=dist.group.WORLD,
            device=device,
            options=ps.RunOptions(
                transport=transport if is_cuda else "auto", cuda_graphs=is_captured and is_cuda
            ),
        )
        assert pipeline.schedule.dataflow != pipe.dataflow
        with closing(pipeline):
            for number, rows in enumerate([8, 8, 8, 12, 8]):
                batch = numbers(rows, WIDTH, seed=number).to(device)
                target = numbers(rows, 2, seed=number + 50).to(device)
                if far := twin.step(pipeline, batch, target):
                    wrong[f"{family}, step {number}"] = far
    return wrong


@pytest.mark.parametrize("transport", ["peer memory", "nccl"])
@pytest.mark.parametrize("way", ["layers", "traced"])
def test_shared_values_are_exact_on_four_ranks(
    way: Way, transport: TransportChoice, four_ranks: Processes, accelerator: torch.device
) -> None:
    job = (way, accelerator, transport, False)
    assert four_ranks.run(train, *job, seconds=180.0) == [{}] * 4


@pytest.mark.parametrize("way", ["layers", "traced"])
def test_shared_values_are_exact_in_captured_stages(
    way: Way, two_ranks: Processes, accelerator: torch.device
) -> None:
    assert two_ranks.run(train, way, accelerator, "auto", True, seconds=180.0) == [{}] * 2
