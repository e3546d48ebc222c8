"""Stages that are data-parallel or tensor-parallel themselves, over four processes."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from penstock.dropin._utils import _DTensorMeta
from tests.covering import all_but_slow
from tests.dropin.scripts import (
    IS_OLD_TORCH,
    LOOPED,
    OURS,
    SINGLE,
    THEIRS,
    V_SHAPED,
    gradients,
    load,
    make_batch,
    make_blocks,
    stages_of,
    step,
)
from tests.processes import Processes
from tests.training.composition import CollectiveLog

CPU = torch.device("cpu")
ALL = (*SINGLE, *LOOPED, *V_SHAPED)
CLOSE: Any = {"rtol": 1e-12, "atol": 1e-12}


def make_schedule(
    package: str, name: str, held: dict[int, nn.Module], num_stages: int, **settings: Any
) -> Any:
    modules = load(package)
    stages = [
        modules.stage.PipelineStage(module, index, num_stages, CPU, **settings)
        for index, module in held.items()
    ]
    given = stages[0] if name in SINGLE else stages
    schedule_class = modules.schedules.get_schedule_class(name)
    return schedule_class(given, 4, loss_fn=nn.functional.mse_loss)


def wrap(kind: str, block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    match kind:
        case "ddp":
            return DistributedDataParallel(block, process_group=mesh.get_group())
        case "fsdp of layers":
            for child in block.children():
                fully_shard(child, mesh=mesh)
    return fully_shard(block, mesh=mesh)  # type: ignore[return-value]  # a module too


def train_copies(rank: int, name: str, kind: str) -> int:
    """Gradient descent every two steps, against the unsplit model on both halves of the data."""
    del rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    number, pipeline_rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    indices = stages_of(name, pipeline_rank, 2)
    blocks = make_blocks(2 * len(indices))
    model = nn.Sequential(*copy.deepcopy(blocks))
    held = {index: wrap(kind, blocks[index], mesh["dp"]) for index in indices}
    schedule = make_schedule(OURS, name, held, len(blocks), group=mesh["pp"].get_group())
    weights = [weight for module in held.values() for weight in module.parameters()]
    ours = torch.optim.SGD(weights, lr=0.1)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    collectives = 0
    for turn in range(2):
        batches = [make_batch(8, 10 * turn + copy) for copy in range(2)]
        log = CollectiveLog()
        step(schedule, held, 2, batches[number])
        with log:
            step(schedule, held, 2, batches[number])
        collectives = sum(kind in ("all_reduce", "reduce_scatter") for _, kind in log.seen)
        for x, target in batches:
            # Both steps add their halves of the mean over the copies.
            torch.autograd.backward(nn.functional.mse_loss(model(x), target))
        torch.testing.assert_close(whole(held), gradients({i: model[i] for i in indices}), **CLOSE)
        step(schedule, held, 2, batches[number], evaluate=True)
        torch.testing.assert_close(whole(held), gradients({i: model[i] for i in indices}), **CLOSE)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return collectives // len(indices)


def whole(held: dict[int, nn.Module]) -> dict[str, torch.Tensor | None]:
    """Return the gradients, each put together from its shards, named as in the model."""
    return {
        name.replace("module.", ""): grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in gradients(held).items()
    }


@pytest.mark.parametrize("name", all_but_slow(ALL, ("GPipe", "LoopedBFS", "ZBVZeroBubble")))
def test_copies_of_a_stage_average_their_gradients_once(
    four_processes: Processes, name: str
) -> None:
    assert four_processes.run(train_copies, name, "ddp") == [1] * 4


@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble", "DualPipeV"])
def test_sharded_stages_reduce_their_gradients_once(four_processes: Processes, name: str) -> None:
    assert four_processes.run(train_copies, name, "fsdp") == [1] * 4


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_with_sharded_layers_reduce_each_once(four_processes: Processes, name: str) -> None:
    assert four_processes.run(train_copies, name, "fsdp of layers") == [3] * 4


class Wide(nn.Module):
    """A norm and two layers, which lie over a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return output


def spread(block: nn.Module, mesh: DeviceMesh, placement: Any) -> nn.Module:
    plan: dict[str, Any] = {
        "norm": SequenceParallel(sequence_dim=1, use_local_output=False),
        "up": ColwiseParallel(input_layouts=placement, use_local_output=False),
        "down": RowwiseParallel(output_layouts=placement, use_local_output=False),
    }
    if isinstance(placement, Replicate):
        del plan["norm"]
        for name, weight in list(block.norm.named_parameters()):  # type: ignore[union-attr]  # a module
            whole = DTensor.from_local(weight.detach(), mesh, [Replicate()])
            block.norm.register_parameter(name, nn.Parameter(whole))  # type: ignore[union-attr]  # a module
    return parallelize_module(block, mesh, plan)


def train_over_a_mesh(
    rank: int, package: str, name: str, placement: Any
) -> list[tuple[_DTensorMeta, torch.Tensor]]:
    """Two steps with activations over a mesh: the gradients' local parts, and how they lie."""
    del rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    indices = stages_of(name, mesh["pp"].get_local_rank(), 2)
    torch.manual_seed(0)
    blocks = nn.ModuleList([Wide() for _ in range(2 * len(indices))]).double()
    held = {index: spread(blocks[index], mesh["tp"], placement) for index in indices}
    schedule = make_schedule(
        package,
        name,
        held,
        len(blocks),
        group=mesh["pp"].get_group(),
        get_mesh=lambda _names, _layout: mesh["tp"],
    )
    generator = torch.Generator().manual_seed(1)
    losses: list[torch.Tensor] = []
    for rows in (8, 8):
        x, target = (
            distribute_tensor(
                torch.randn(rows, 4, 8, dtype=torch.float64, generator=generator),
                mesh["tp"],
                [placement],
            )
            for _ in range(2)
        )
        for module in held.values():
            module.zero_grad()
        found, _ = step(schedule, held, 2, (x.requires_grad_(), target))
        losses += [loss.full_tensor() for loss in found]  # type: ignore[attr-defined]  # a DTensor
    grads = [grad for grad in gradients(held).values() if isinstance(grad, DTensor)]
    assert len(grads) == 6 * len(indices)
    described = [(_DTensorMeta.from_dtensor(grad), grad.to_local()) for grad in grads]
    return [*described, *((described[0][0], loss) for loss in losses)]


def compare_over_a_mesh(rank: int, name: str, placement: Any) -> None:
    ours = train_over_a_mesh(rank, OURS, name, placement)
    theirs = train_over_a_mesh(rank, THEIRS, name, placement)
    assert [meta for meta, _ in ours] == [meta for meta, _ in theirs]
    torch.testing.assert_close(
        [value for _, value in ours], [value for _, value in theirs], **CLOSE
    )


@pytest.mark.skipif(IS_OLD_TORCH, reason="torch's stages know no meshes")
@pytest.mark.parametrize(
    ("name", "placement"),
    all_but_slow(
        product(["1F1B", "Interleaved1F1B", "ZBVZeroBubble"], [Replicate(), Shard(1)]),
        [("1F1B", Replicate()), ("Interleaved1F1B", Shard(1)), ("ZBVZeroBubble", Replicate())],
    ),
)
def test_tensors_over_a_mesh_cross_as_in_torch(
    four_processes: Processes, name: str, placement: Any
) -> None:
    four_processes.run(compare_over_a_mesh, name, placement)
