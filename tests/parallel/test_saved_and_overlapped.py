"""Two pipelines of two ranks, as copies or shards, that recompute, offload and overlap at once."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.ir.actions import Kind
from penstock.passes import add_offload, add_recompute
from tests.models import differences, make_batch, mean_loss
from tests.processes import Processes
from tests.strategies import join_at
from tests.training.composition import own_stages, reference_gradients, whole_gradients
from tests.training.test_overlap import make_stages

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]
FAMILIES = ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZBV", "DualPipeV")
MICROBATCHES = 6
SEEDS = range(4)


def copy(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(stage, process_group=mesh.get_group())


def shard(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(stage, mesh=mesh)
    return stage


def draw_schedule(family: str, seed: int) -> ps.Schedule:
    """Return an order of which some pairs overlap, with some forwards recomputed or offloaded."""
    random = Random(seed)
    schedule = ps.build(family, ranks=2, microbatches=MICROBATCHES)
    for row in random.sample(range(1, len(schedule.rows)), 12):
        schedule = join_at(schedule, row)
    pairs = [(s, m) for s in range(schedule.num_stages) for m in range(MICROBATCHES)]
    random.shuffle(pairs)
    third = len(pairs) // 3
    schedule = add_recompute(schedule, pairs[:third])
    return add_offload(
        schedule, pairs[third : 2 * third], behind=random.randint(0, 2), ahead=random.randint(0, 2)
    )


def train(_: int, wrap: Wrap, schedules: Sequence[ps.Schedule]) -> list[dict[str, float]]:
    """Return where the gradients of two steps differ from the unsplit model's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica, rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    wrong = []
    for schedule in schedules:
        stages = make_stages(schedule.num_stages)
        own = own_stages(stages, schedule, rank)
        wrapped = {index: wrap(stage, mesh["dp"]) for index, stage in own.items()}
        batch, target = make_batch(4 * MICROBATCHES)
        whole = reference_gradients(stages, batch, target)
        with ps.Pipeline(wrapped, schedule, loss=mean_loss, group=mesh["pp"]) as pipeline:
            for _ in range(2):
                pipeline.zero_grad()
                pipeline.step(batch.chunk(2)[replica], target=target.chunk(2)[replica])
            found = whole_gradients(pipeline.named_parameters())
        found = {name.replace("module.", ""): gradient for name, gradient in found.items()}
        expected = {n: g for n, g in whole.items() if int(n.split(".")[0]) in own}
        wrong.append(differences(found, expected))
    return wrong


def check(processes: Processes, wrap: Wrap, schedules: Sequence[ps.Schedule]) -> None:
    for schedule in schedules:
        kinds = {kind for kind in Kind if schedule.rows.has_kind(kind)}
        assert kinds >= {Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD}
        assert schedule.rows.joined.any()
    assert processes.run(train, wrap, schedules) == [[{}] * len(schedules)] * 4


@pytest.mark.parametrize("wrap", [copy, shard])
def test_gradients_are_those_of_the_unsplit_model(four_processes: Processes, wrap: Wrap) -> None:
    check(four_processes, wrap, [draw_schedule("DualPipeV", 0)])


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [copy, shard])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_unsplit_model_in_many_orders(
    four_processes: Processes, family: str, wrap: Wrap
) -> None:
    check(four_processes, wrap, [draw_schedule(family, seed) for seed in SEEDS])
