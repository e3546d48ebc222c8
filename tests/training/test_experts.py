"""Experts spread over a group beside the pipeline: two pipeline ranks times two expert ranks."""

from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import penstock as ps
from tests.covering import all_but_slow
from tests.experts import EXCHANGES, WIDTH, Block, Unsplit
from tests.models import differences
from tests.processes import Processes
from tests.strategies import FAMILY_NAMES, join_at
from tests.tables import read_schedule

EXPERTS, MICROBATCHES = 4, 6
# Ranks of one expert group have different batches, of different sizes.
ROWS = 18, 13
# Overlapped halves of backwards; the brackets are short for overlaps.
HALVES = """
0F0 0F1 0F2 0I0 (0F3;0W0) 0I1 (0F4;0W1) 0I2 (0F5;0W2) (0I3;0B4) 0W3 0B5
1F0 1F1 (1F2;1I0) (1F3;1I1) (1W0;1I2) (1F4;1W1) (1F5;1I3) 1W2 1B4 1W3 1B5
"""


def make_batch(number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + number)
    pair = torch.randn(2, ROWS[number], WIDTH, dtype=torch.float64).to(device)
    return pair[0], pair[1]


def gradients_of(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{inner}": p.grad for inner, p in module.named_parameters() if p.grad is not None
    }


def run_experts(
    _: int, schedule: ps.Schedule, is_checkpointed: bool, exchange: str, options: ps.RunOptions
) -> dict[str, Any]:
    """Train experts on two times two processes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inside", "pipeline"))
    return train_experts(
        mesh, schedule, is_checkpointed=is_checkpointed, exchange=exchange, options=options
    )


def train_experts(
    mesh: DeviceMesh,
    schedule: ps.Schedule,
    *,
    is_checkpointed: bool,
    exchange: str,
    options: ps.RunOptions,
    steps: int = 2,
) -> dict[str, Any]:
    """Train, and return where gradients are wrong and what the pipeline says of itself."""
    device = torch.device(mesh.device_type)
    group, number = mesh["inside"].get_group(), mesh["inside"].get_local_rank()
    torch.manual_seed(1)
    whole = [
        Block(EXPERTS, is_checkpointed=is_checkpointed, exchange=exchange).double().to(device)
        for _ in range(schedule.dataflow.num_parts)
    ]
    expected = [make_batch(each, device) for each in range(2)]
    stages = {}
    for stage in schedule.placement.stages(mesh["pipeline"].get_local_rank()):
        stages[stage] = deepcopy(whole[schedule.dataflow.parts[stage]])
        stages[stage].experts.local(group)
    for batch, target in expected:
        Unsplit(whole).loss(batch, target, MICROBATCHES).backward()  # type: ignore[no-untyped-call]  # untyped upstream
    batch, target = expected[number]
    with ps.Pipeline(
        stages,
        schedule,
        microbatches=MICROBATCHES,
        loss=nn.functional.mse_loss,
        group=mesh["pipeline"],
        device=device,
        options=options,
    ) as pipeline:
        for _ in range(steps):
            pipeline.zero_grad()
            pipeline.step(batch, target=target)
        text = repr(pipeline)
    wrong: dict[str, float] = {}
    for stage, module in stages.items():
        # What every rank of the group has is reduced by whoever trains, as in data parallelism.
        for inner, parameter in module.named_parameters():
            if ".experts." not in inner:
                dist.all_reduce(parameter.grad, group=group)
        found = gradients_of(module, str(stage))
        wanted = gradients_of(whole[schedule.dataflow.parts[stage]], str(stage))
        wrong |= differences(found, {name: wanted[name] for name in found})
    return {"wrong": wrong, "repr": text}


def train(
    processes: Processes,
    schedule: ps.Schedule,
    *,
    is_checkpointed: bool,
    exchange: str = "marked",
    options: ps.RunOptions = ps.RunOptions(),  # noqa: B008  # a frozen value
) -> list[str]:
    """Compare gradients on all four ranks; return how each has run its overlapped actions."""
    job = run_experts, schedule, is_checkpointed, exchange, options
    everyone = processes.run(*job, seconds=120)
    assert [found["wrong"] for found in everyone] == [{}] * 4
    return [found["repr"] for found in everyone]


@pytest.mark.parametrize("is_checkpointed", all_but_slow([False, True], [True]))
def test_dualpipe_v_exchanges_beside_compute_and_is_exact(
    four_processes: Processes, is_checkpointed: bool
) -> None:
    schedule = ps.build("DualPipeV", ranks=2, microbatches=MICROBATCHES)
    for text in train(four_processes, schedule, is_checkpointed=is_checkpointed):
        assert "overlapped actions by turns" in text


@pytest.mark.parametrize("exchange", ["functional", "own"])
@pytest.mark.parametrize("is_checkpointed", all_but_slow([False, True], [True]))
def test_exchanges_that_nobody_marks_are_found(
    four_processes: Processes, exchange: str, is_checkpointed: bool
) -> None:
    schedule = ps.build("DualPipeV", ranks=2, microbatches=MICROBATCHES)
    for text in train(
        four_processes, schedule, is_checkpointed=is_checkpointed, exchange=exchange
    ):
        assert "overlapped actions by turns (turning points in stages" in text


def test_turning_points_are_not_looked_for_on_request(four_processes: Processes) -> None:
    schedule = ps.build("DualPipeV", ranks=2, microbatches=MICROBATCHES)
    options = ps.RunOptions(find_turning_points=False)
    for text in train(
        four_processes, schedule, is_checkpointed=False, exchange="own", options=options
    ):
        assert "overlapped actions one after the other (no turning points)" in text


@pytest.mark.parametrize("family", all_but_slow(["1F1B", "ZBV"], ["1F1B"]))
def test_schedules_without_overlap_are_exact(four_processes: Processes, family: str) -> None:
    schedule = ps.build(family, ranks=2, microbatches=MICROBATCHES)
    for text in train(four_processes, schedule, is_checkpointed=True):
        assert "overlapped" not in text


def test_halves_of_backwards_exchange_beside_forwards(four_processes: Processes) -> None:
    schedule = read_schedule(HALVES.replace(")", ")OVERLAP_F_B"))
    for text in train(four_processes, schedule, is_checkpointed=False):
        assert "overlapped actions by turns" in text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_overlaps_are_exact(four_processes: Processes, seed: int) -> None:
    random = Random(seed)
    family = random.choice([name for name in FAMILY_NAMES if name != "ForwardOnly"])
    schedule = ps.build(family, ranks=2, microbatches=MICROBATCHES)
    places = list(range(1, len(schedule.rows)))
    for place in random.sample(places, len(places) // 2):
        schedule = join_at(schedule, place)
    assert schedule.rows.joined.any()
    is_checkpointed, exchange = random.random() < 0.5, random.choice(sorted(EXCHANGES))
    train(four_processes, schedule, is_checkpointed=is_checkpointed, exchange=exchange)
