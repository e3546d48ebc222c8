"""Two pipelines of two ranks each over NCCL, whose stages FSDP2 shards or DDP copies."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from tests.gpu.problems import EQUAL, closing, make_batch, make_blocks, widths_of
from tests.models import cut, differences, make_stages, mean_loss
from tests.processes import Processes
from tests.training.composition import own_stages, reference_gradients, whole_gradients

pytestmark = pytest.mark.gpu

FAMILIES = ("1F1B", "ZB-H1", "Interleaved1F1B", "ZBV", "DualPipeV")
MICROBATCHES = 4


def wrap(stage: nn.Module, copying: str, mesh: DeviceMesh) -> nn.Module:
    if copying == "FSDP2":
        fully_shard(stage, mesh=mesh["data"])
        return stage
    return DistributedDataParallel(stage, process_group=mesh["data"].get_group())


def unwrapped(name: str) -> str:
    return name.replace("module.", "")


def train_meshed(rank: int, device: torch.device, copying: str) -> dict[str, dict[str, float]]:
    """Every family: gradients of the whole batch, after every step and on every rank."""
    del rank
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "pipeline"))
    part, place = mesh["data"].get_local_rank(), mesh["pipeline"].get_local_rank()
    wrong: dict[str, dict[str, float]] = {}
    for family in FAMILIES:
        blocks = make_blocks(widths_of(8, are_equal=False), device)
        stages = make_stages(family, 2, blocks)
        schedule = ps.build(family, ranks=2, microbatches=MICROBATCHES)
        own = {
            index: wrap(stage, copying, mesh)
            for index, stage in own_stages(stages, schedule, place).items()
        }
        pipeline = ps.Pipeline(
            own, schedule, loss=mean_loss, group=mesh["pipeline"], device=device
        )
        with closing(pipeline):
            for number, rows in enumerate([16, 16, 32, 16]):
                batch, target = make_batch((rows, EQUAL), number, device)
                for parameter in pipeline.parameters():
                    parameter.grad = None
                pipeline.step(batch.chunk(2)[part], target=target.chunk(2)[part])
                found = whole_gradients(pipeline.named_parameters())
                found = {unwrapped(name): gradient for name, gradient in found.items()}
                whole = reference_gradients(cut(blocks, len(stages)), batch, target)
                held = {f"{index}." for index in own}
                expected = {
                    name: gradient
                    for name, gradient in whole.items()
                    if name.startswith(tuple(held))
                }
                if far := differences(found, expected):
                    wrong[f"{family}, step {number}"] = far
                dist.barrier()
    return wrong


@pytest.mark.parametrize("copying", ["FSDP2", "DDP"])
def test_two_by_two_ranks_have_the_gradients_of_the_unsplit_model_after_every_step(
    four_ranks: Processes, accelerator: torch.device, copying: str
) -> None:
    # In the second world of a process torch crashes while it splits NCCL's group for a mesh.
    four_ranks.stop()
    assert four_ranks.run(train_meshed, accelerator, copying, seconds=150.0) == [{}] * 4
