"""Clipping: the norm of the unsplit model on every rank, however its parameters are spread."""

from copy import deepcopy
from itertools import product
from math import inf, isnan, nan

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import penstock as ps
from tests.covering import all_but_slow
from tests.models import copy_blocks, cut, differences, make_batch, make_blocks, mean_loss
from tests.processes import Processes
from tests.training.composition import own_stages, reference_gradients, whole_gradients

MAX_NORM = 0.01


def clip_whole(
    stages: list[nn.Sequential], norm_type: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the norm of the unsplit model's gradients, and the gradients after clipping."""
    model = deepcopy(nn.Sequential(*stages))
    batch, target = make_batch()
    torch.autograd.backward(mean_loss(model(batch), target))
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type).item()
    return norm, whole_gradients(model.named_parameters())


def clip_split(
    rank: int, family: str, norm_type: float, with_group: bool = True
) -> tuple[float, dict[str, float]]:
    """Return the norm as the pipeline finds it, and where the clipped gradients differ."""
    del rank
    schedule = ps.build(family, ranks=4, microbatches=4)
    stages = cut(make_blocks(), schedule.num_stages)
    expected_norm, expected = clip_whole(stages, norm_type)
    pipeline = ps.Pipeline(
        copy_blocks(stages),
        schedule,
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD if with_group else None,
    )
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    norm = pipeline.clip_grad_norm_(MAX_NORM, norm_type)
    found = whole_gradients(pipeline.named_parameters())
    assert abs(norm - expected_norm) < 1e-12
    return norm, differences(found, {name: expected[name] for name in found})


@pytest.mark.parametrize(
    ("family", "norm_type"),
    all_but_slow(product(["1F1B", "ZBV"], [2.0, inf, 1.0]), [("1F1B", inf), ("ZBV", 2.0)]),
)
def test_every_rank_clips_by_the_norm_of_the_unsplit_model(
    family: str, norm_type: float, four_processes: Processes
) -> None:
    results = four_processes.run(clip_split, family, norm_type)
    assert results == [(results[0][0], {})] * 4


@pytest.mark.parametrize("norm_type", [2.0, inf])
def test_one_process_clips_by_the_norm_of_the_unsplit_model(norm_type: float) -> None:
    norm, wrong = clip_split(0, "ZBV", norm_type, with_group=False)
    assert norm > MAX_NORM
    assert wrong == {}


def test_small_gradients_are_left_alone() -> None:
    pipeline = ps.Pipeline(cut(make_blocks(), 2), "1F1B", microbatches=2, loss=mean_loss)
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    before = whole_gradients(pipeline.named_parameters())
    norm = pipeline.clip_grad_norm_(1e3)
    assert norm < 1e3
    assert differences(whole_gradients(pipeline.named_parameters()), before, limit=0.0) == {}


def test_norm_of_nan_is_returned_and_shows_in_every_gradient() -> None:
    pipeline = ps.Pipeline(cut(make_blocks(), 2), "1F1B", microbatches=2, loss=mean_loss)
    for parameter in pipeline.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(pipeline.parameters()).grad = torch.full_like(next(pipeline.parameters()), nan)
    assert isnan(pipeline.clip_grad_norm_(1.0))
    assert all(p.grad is not None and bool(p.grad.isnan().all()) for p in pipeline.parameters())


def test_a_norm_of_order_zero_is_refused() -> None:
    pipeline = ps.Pipeline(cut(make_blocks(), 2), "1F1B", microbatches=2, loss=mean_loss)
    with pytest.raises(ValueError, match=r"norm_type must be above 0, or infinity"):
        pipeline.clip_grad_norm_(1.0, norm_type=0.0)


def clip_sharded(_: int, norm_type: float) -> tuple[float, dict[str, float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    schedule = ps.build("ZBV", ranks=2, microbatches=4)
    stages = cut(make_blocks(), 4)
    own = own_stages(stages, schedule, mesh["pp"].get_local_rank())
    for module in own.values():
        fully_shard(module, mesh=mesh["dp"])
    pipeline = ps.Pipeline(own, schedule, microbatches=4, loss=mean_loss, group=mesh["pp"])
    batch, target = make_batch()
    half = slice(8 * mesh["dp"].get_local_rank(), 8 * mesh["dp"].get_local_rank() + 8)
    pipeline.step(batch[half], target=target[half])
    norm = pipeline.clip_grad_norm_(MAX_NORM, norm_type)
    expected_norm, expected = clip_whole(stages, norm_type)
    found = whole_gradients(pipeline.named_parameters())
    assert abs(norm - expected_norm) < 1e-12
    return norm, differences(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("norm_type", [2.0, inf])
def test_gradients_in_shards_count_once(norm_type: float, four_processes: Processes) -> None:
    results = four_processes.run(clip_sharded, norm_type)
    assert results == [(results[0][0], {})] * 4


def clip_tensor_parallel(_: int) -> tuple[float, dict[str, float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    schedule = ps.build("1F1B", ranks=2, microbatches=4)
    stages = cut(make_blocks(), 2)
    own = own_stages(stages, schedule, mesh["pp"].get_local_rank())
    for module in own.values():
        # Two layers of each stage are spread over the mesh; the other two are whole on each rank.
        plan = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()}
        parallelize_module(module, mesh["tp"], plan)
    pipeline = ps.Pipeline(own, schedule, microbatches=4, loss=mean_loss, group=mesh["pp"])
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    found = whole_gradients(pipeline.named_parameters())
    reference = reference_gradients(stages, batch, target)
    assert differences(found, {name: reference[name] for name in found}) == {}
    norm = pipeline.clip_grad_norm_(MAX_NORM)
    expected_norm, expected = clip_whole(stages, 2.0)
    assert abs(norm - expected_norm) < 1e-12
    found = whole_gradients(pipeline.named_parameters())
    return norm, differences(found, {name: expected[name] for name in found})


def test_gradients_of_tensor_parallel_layers_count_once(four_processes: Processes) -> None:
    results = four_processes.run(clip_tensor_parallel)
    assert results == [(results[0][0], {})] * 4
