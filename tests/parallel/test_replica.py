"""Data-parallel stages in real processes: two replicas of a pipeline of two ranks."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TypeAlias

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.parallel.replica import replica_of
from tests.covering import all_but_slow
from tests.models import cut, differences, make_batch, make_blocks, mean_loss
from tests.processes import Processes
from tests.training.composition import (
    CollectiveLog,
    own_stages,
    reference_gradients,
    whole_gradients,
)

Make: TypeAlias = Callable[[nn.Module, DeviceMesh], nn.Module]
Log: TypeAlias = list[tuple[str, str]]
ROWS = 8
MICROBATCHES = 4


def shard_stage(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(module, mesh=mesh)
    return module


def shard_blocks(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in module.children():
        fully_shard(block, mesh=mesh)
    return module


def shard_both(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    first, *_ = module.children()
    fully_shard(first, mesh=mesh)
    return shard_stage(module, mesh)


class Recomputed(nn.Module):
    """A block under activation checkpointing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.module, value, use_reentrant=False)
        return output


def shard_recomputed(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return shard_both(nn.Sequential(*map(Recomputed, module.children())), mesh)


def wrap(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def wrap_blocks(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(*(wrap(block, mesh) for block in module.children()))


def mark(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return replicate(module, process_group=mesh.get_group())


def mark_by_fsdp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    replicate_by_fsdp(module, mesh=mesh)
    return module


def _by_own_name(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return names without what wrappers add to them."""
    return {name.replace("module.", ""): gradient for name, gradient in gradients.items()}


class Line:
    """One rank of dp=2 x pp=2, with its data-parallel stages and their pipeline."""

    def __init__(
        self,
        make: Callable[[nn.Module, DeviceMesh], nn.Module],
        schedule: ps.Schedule,
        loss: Callable[..., torch.Tensor] = mean_loss,
    ) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        self.schedule = schedule
        self.copy = mesh["dp"].get_local_rank()
        self.rank = mesh["pp"].get_local_rank()
        self.stages = cut(make_blocks(), schedule.num_stages)
        self.log = CollectiveLog()
        own = own_stages(self.stages, schedule, self.rank)
        self.pipeline = ps.Pipeline(
            {stage: make(module, mesh["dp"]) for stage, module in own.items()},
            schedule,
            microbatches=schedule.microbatches,
            loss=loss,
            group=mesh["pp"],
            options=ps.RunOptions(around=dict.fromkeys(ps.Kind, self.log.watch)),
        )
        self.batch, self.target = make_batch(2 * ROWS)

    def step(self) -> None:
        """Run one step on this replica's half of the batch."""
        half = slice(ROWS * self.copy, ROWS * (self.copy + 1))
        self.pipeline.step(self.batch[half], target=self.target[half])

    def reference(self, steps: int) -> dict[str, torch.Tensor]:
        """Return the expected gradients of this rank's stages, over both halves of the batch."""
        whole = reference_gradients(self.stages, self.batch, self.target)
        own = {str(stage) for stage in self.pipeline.modules}
        return {n: steps * g for n, g in whole.items() if n.split(".")[0] in own}

    def differences(self, steps: int) -> dict[str, float]:
        found = whole_gradients(self.pipeline.named_parameters())
        return differences(_by_own_name(found), self.reference(steps))


def expected_log(schedule: ps.Schedule, rank: int, inside: Mapping[ps.Kind, list[str]]) -> Log:
    """Return the expected log of a step in which these kinds of action run these collectives."""
    lowered = schedule if schedule.has_communication else ps.lower(schedule)
    return [
        (str(action), collective)
        for action in lowered.order(rank)
        if isinstance(action, ps.Action)
        for collective in inside.get(action.kind, [])
    ]


def train_twice(_: int, make: Make, schedule: ps.Schedule) -> tuple[list[dict[str, float]], Log]:
    """Return where gradients differ after each of two steps, and the collectives of the second."""
    line = Line(make, schedule)
    line.step()
    differences = [line.differences(steps=1)]
    line.log.seen.clear()
    line.step()
    seen = [entry for entry in line.log.seen if entry[1] != "send"]
    return [*differences, line.differences(steps=2)], seen


FAMILIES = ("1F1B", "Interleaved1F1B", "ZBV")
SHARDED = {
    "1F1B": (shard_stage, 1),
    "Interleaved1F1B": (shard_both, 2),
    "ZBV": (shard_blocks, 2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_stages_are_gathered_and_reduced_where_the_lowered_order_says(
    family: str, four_processes: Processes
) -> None:
    make, groups = SHARDED[family]
    schedule = ps.build(family, ranks=2, microbatches=MICROBATCHES)
    assert four_processes.run(train_twice, make, schedule) == sharded_results(schedule, groups)


@pytest.mark.parametrize("family", ["Interleaved1F1B", "ZBV"])
def test_sharded_stages_may_be_resharded_between_forward_and_backward(
    family: str, four_processes: Processes
) -> None:
    schedule = ps.lower(ps.build(family, ranks=2, microbatches=MICROBATCHES), whole_stages=1)
    assert four_processes.run(train_twice, shard_both, schedule) == sharded_results(schedule, 2)


@pytest.mark.parametrize("family", ["Interleaved1F1B", "ZBV"])
def test_sharded_stages_with_activation_checkpointing_gather_once(
    family: str, four_processes: Processes
) -> None:
    schedule = ps.build(family, ranks=2, microbatches=MICROBATCHES)
    expected = sharded_results(schedule, 2)
    assert four_processes.run(train_twice, shard_recomputed, schedule) == expected


def sharded_results(schedule: ps.Schedule, groups: int) -> list[object]:
    inside = {
        ps.Kind.UNSHARD: ["gather"] * groups,
        ps.Kind.REDUCE_GRAD: ["reduce_scatter"] * groups,
    }
    return [([{}, {}], expected_log(schedule, rank, inside)) for rank in (0, 0, 1, 1)]


def train_in_low_precision(_: int) -> tuple[set[torch.dtype], dict[str, float]]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def make(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        fully_shard(module.float(), mesh=mesh, mp_policy=policy)
        return module

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mean_loss(output.float(), target.float())

    line = Line(make, ps.build("ZBV", ranks=2, microbatches=MICROBATCHES), loss)
    line.batch, line.target = line.batch.bfloat16(), line.target.bfloat16()
    line.step()
    found = whole_gradients(line.pipeline.named_parameters())
    line.batch, line.target = line.batch.double(), line.target.double()
    dtypes = {gradient.dtype for gradient in found.values()}
    return dtypes, differences(found, line.reference(steps=1), limit=2e-3)


def test_sharded_stages_in_low_precision_are_reduced_in_the_precision_asked_for(
    four_processes: Processes,
) -> None:
    assert four_processes.run(train_in_low_precision) == [({torch.float32}, {})] * 4


def train_evaluate_train(_: int) -> dict[str, float]:
    line = Line(shard_stage, ps.build("1F1B", ranks=2, microbatches=MICROBATCHES))
    line.step()
    outputs = line.pipeline.evaluate(line.batch, microbatches=3).outputs
    if line.rank == 1:
        whole = deepcopy(nn.Sequential(*line.stages))(line.batch)
        torch.testing.assert_close(outputs, whole.detach(), rtol=0, atol=1e-12)
    line.step()
    return line.differences(steps=2)


def test_sharded_stages_evaluate_between_steps(four_processes: Processes) -> None:
    assert four_processes.run(train_evaluate_train) == [{}] * 4


class Refuse(nn.Module):
    """A layer that fails on demand."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_refusing = False
        self.calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.is_refusing and self.calls == MICROBATCHES:
            raise ValueError("refused")
        output: torch.Tensor = self.module(value)
        return output


def fail_then_train(_: int, make: Make) -> dict[str, float]:
    line = Line(
        lambda module, mesh: Refuse(make(module, mesh)),
        ps.build("1F1B", ranks=2, microbatches=MICROBATCHES),
    )
    modules = [m for m in line.pipeline.modules.values() if isinstance(m, Refuse)]
    for module in modules:
        module.is_refusing = line.rank == 1
    with pytest.raises(ps.errors.PipelineError, match="refused"):
        line.step()
    for module in modules:
        module.is_refusing = False
    for parameter in line.pipeline.parameters():
        parameter.grad = None
    line.step()
    return line.differences(steps=1)


@pytest.mark.parametrize("make", [shard_stage, wrap])
def test_a_failed_step_leaves_nothing_in_the_gradients_of_the_next(
    make: Make, four_processes: Processes
) -> None:
    assert four_processes.run(fail_then_train, make) == [{}] * 4


@pytest.mark.parametrize(
    ("make", "family", "reductions"),
    all_but_slow(
        [
            (wrap, "1F1B", 1),
            (wrap, "Interleaved1F1B", 1),
            (wrap, "ZBV", 1),
            (wrap_blocks, "ZBV", 2),
            (mark, "ZBV", 1),
            (mark_by_fsdp, "ZBV", 1),
        ],
        [
            (wrap, "Interleaved1F1B", 1),
            (wrap_blocks, "ZBV", 2),
            (mark, "ZBV", 1),
            (mark_by_fsdp, "ZBV", 1),
        ],
    ),
)
def test_replicated_stages_are_averaged_by_one_message_per_step(
    make: Make, family: str, reductions: int, four_processes: Processes
) -> None:
    schedule = ps.build(family, ranks=2, microbatches=MICROBATCHES)
    inside = {ps.Kind.REDUCE_GRAD: ["all_reduce"] * reductions}
    assert four_processes.run(train_twice, make, schedule) == [
        ([{}, {}], expected_log(schedule, rank, inside)) for rank in (0, 0, 1, 1)
    ]


def add_to_what_was_there(_: int) -> dict[str, float]:
    line = Line(wrap, ps.build("ZBV", ranks=2, microbatches=MICROBATCHES))
    for parameter in line.pipeline.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + line.copy)
    line.step()
    found = _by_own_name(whole_gradients(line.pipeline.named_parameters()))
    added = {name: gradient - (1.0 + line.copy) for name, gradient in found.items()}
    return differences(added, line.reference(steps=1))


def test_only_the_gradients_of_this_step_are_averaged(four_processes: Processes) -> None:
    assert four_processes.run(add_to_what_was_there) == [{}] * 4


class Sometimes(nn.Module):
    """Has one parameter that it uses only if asked to, and one that it never uses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.is_scaling = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(value)
        return output * self.scale if self.is_scaling else output


def use_on_one_copy(_: int) -> dict[str, float | None]:
    line = Line(
        lambda module, mesh: wrap(Sometimes(module), mesh),
        ps.build("1F1B", ranks=2, microbatches=MICROBATCHES),
    )
    (wrapped,) = line.pipeline.modules.values()
    own = wrapped.module
    assert isinstance(own, Sometimes)
    own.is_scaling = line.copy == 0
    line.step()
    return {
        name: None if p.grad is None else p.grad.item()
        for name, p in (("scale", own.scale), ("unused", own.unused))
    }


def test_a_parameter_that_one_replica_uses_is_averaged_and_an_unused_one_gets_no_gradient(
    four_processes: Processes,
) -> None:
    first, second, third, fourth = four_processes.run(use_on_one_copy)
    assert first == second
    assert third == fourth
    assert first["unused"] is third["unused"] is None
    assert first["scale"]
    assert third["scale"]


def count_in_buffers(_: int) -> tuple[list[int], list[str]]:
    line = Line(
        lambda module, mesh: wrap(
            nn.Sequential(module, nn.BatchNorm1d(16, dtype=torch.float64)), mesh
        ),
        ps.build("1F1B", ranks=2, microbatches=MICROBATCHES),
    )
    (wrapped,) = line.pipeline.modules.values()
    (norm,) = (m for m in wrapped.modules() if isinstance(m, nn.BatchNorm1d))
    assert norm.num_batches_tracked is not None
    counts = []
    for _step in range(2):
        line.step()
        counts.append(int(norm.num_batches_tracked))
    return counts, [action for action, name in line.log.seen if name == "broadcast"]


def test_buffers_of_replicas_are_broadcast_once_per_step(four_processes: Processes) -> None:
    # One message for the mean and the variance, one for the counter.
    assert four_processes.run(count_in_buffers) == [
        ([4, 8], [f"{rank}F0"] * 4) for rank in (0, 0, 1, 1)
    ]


def test_a_stage_on_one_rank_has_no_data_parallelism() -> None:
    replica = replica_of(nn.Linear(2, 2))
    replica.begin_step()
    with replica.forward_context():
        replica.unshard()
    replica.reduce_gradients()
    replica.reshard()
    replica.abandon_step()
