"""Tensors over a mesh at boundaries: two ranks of a pipeline, each of two tensor-parallel ones."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import penstock as ps
from penstock.parallel.dtensor import Meshes, take_local_parts
from penstock.tensors.tree import flatten, unflatten
from penstock.tensors.wire_format import Format, describe
from tests.models import cut, differences, make_batch, make_blocks, mean_loss
from tests.processes import Processes
from tests.training.composition import own_stages, reference_gradients, whole_gradients

MICROBATCHES = 4
# Microbatches of three rows, which two ranks cannot share out evenly.
ROWS = 12


def parallelize(stage: nn.Module, mesh: DeviceMesh, boundary: Placement) -> None:
    """Pairs of layers, column by column and row by row; tensors over the mesh everywhere."""
    plan: dict[str, ParallelStyle] = {}
    for number, name in enumerate(name for name, _ in stage.named_children()):
        plan[f"{name}.0"] = (
            RowwiseParallel(output_layouts=boundary, use_local_output=False)
            if number % 2
            else ColwiseParallel(
                input_layouts=boundary if number else None, use_local_output=False
            )
        )
    parallelize_module(stage, mesh, plan)


class Whole(nn.Module):
    """Gives the first layer its whole input, however it came."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.placements: list[tuple[Placement, ...]] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor):
            self.placements.append(value.placements)
            value = value.redistribute(placements=[Replicate()])
        output: torch.Tensor = self.stage(value)
        return output


def spread_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # Not `mse_loss`: torch gives it a wrong gradient where its input is sharded.
    assert isinstance(output, DTensor)
    goal = DTensor.from_local(target, output.device_mesh, [Replicate()])
    return (output - goal).square().sum() / target.numel()


def train_parallel(
    _: int, family: str, boundary: Placement
) -> tuple[dict[str, float], set[tuple[Placement, ...]], float]:
    """Return where gradients differ, the placements of the inputs, and the loss."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = ps.build(family, ranks=2, microbatches=MICROBATCHES)
    stages = cut(make_blocks(), schedule.num_stages)
    own = own_stages(stages, schedule, mesh["pp"].get_local_rank())
    for module in own.values():
        parallelize(module, mesh["tp"], boundary)
    whole = {number: Whole(module) for number, module in own.items()}
    pipeline = ps.Pipeline(
        whole,
        schedule,
        microbatches=MICROBATCHES,
        loss=spread_loss,
        reduction="mean",
        group=mesh["pp"],
    )
    batch, target = make_batch(ROWS)
    for _step in range(2):
        result = pipeline.step(batch, target=target)
    reference = reference_gradients(stages, batch, target)
    found = {
        name.replace(".stage.", "."): gradient
        for name, gradient in whole_gradients(pipeline.named_parameters()).items()
    }
    wrong = differences(found, {name: 2 * reference[name] for name in found})
    assert result.loss is not None
    return wrong, {p for module in whole.values() for p in module.placements}, result.loss


@pytest.mark.parametrize("boundary", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("family", [pytest.param("1F1B", marks=pytest.mark.slow), "ZBV"])
def test_tensors_over_a_mesh_cross_boundaries_with_their_placements(
    family: str, boundary: Placement, four_processes: Processes
) -> None:
    batch, target = make_batch(ROWS)
    loss = mean_loss(nn.Sequential(*make_blocks())(batch), target).item()
    results = four_processes.run(train_parallel, family, boundary)
    # With 1F1B only the second rank receives; with ZBV both do.
    receiving = [True] * 4 if family == "ZBV" else [False, False, True, True]
    assert [(wrong, seen) for wrong, seen, _ in results] == [
        ({}, {(boundary,)} if receives else set()) for receives in receiving
    ]
    assert [found for _, _, found in results] == pytest.approx([loss] * 4, abs=1e-12)


def send_to_a_stage_without_a_mesh(_: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    value = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    structure, parts = take_local_parts(*flatten({"value": value, "plain": torch.zeros(2)}))
    # It survives the way to another rank as text.
    form = Format.from_bytes(describe(structure, parts).to_bytes())
    assert json.loads(form.structure) == [
        "m",
        [[["tp"], ["shard 0"], [4, 3], [3, 1]], None],
        ["d", [["value", "T"], ["plain", "T"]]],
    ]
    holder = nn.Module()
    with pytest.raises(ps.errors.BoundaryError, match=r"over the mesh dimensions \('tp',\)"):
        Meshes(holder).put_back(form.tree_structure, parts)
    holder.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
    tree = unflatten(*Meshes(holder).put_back(form.tree_structure, parts))
    assert (tree["value"].placements, tuple(tree["value"].shape)) == ((Shard(0),), (4, 3))
    assert type(tree["plain"]) is torch.Tensor


def test_a_stage_without_parameters_on_that_mesh_is_refused(
    two_processes: Processes,
) -> None:
    assert two_processes.run(send_to_a_stage_without_a_mesh) == [None, None]


def send_partial_sums(_: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    holder = nn.Linear(1, 1)
    holder.weight = nn.Parameter(DTensor.from_local(torch.ones(1, 1), mesh, [Replicate()]))
    value = DTensor.from_local(torch.full((1,), 2.0), mesh, [Partial()])
    tree = unflatten(*Meshes(holder).put_back(*take_local_parts(*flatten(value))))
    whole: list[float] = tree.full_tensor().tolist()
    return whole


def test_partial_sums_stay_partial(two_processes: Processes) -> None:
    assert two_processes.run(send_partial_sums) == [[4.0], [4.0]]
