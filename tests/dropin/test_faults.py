"""A rank of a program on torch's classes raises, ends or stops: all others end, and say who."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.dropin.schedules import get_schedule_class
from penstock.dropin.stage import PipelineStage
from tests.alive.fault_cases import (
    EXIT_CODES,
    KINDS,
    MICROBATCHES_OF_FAILURE,
    MISTAKE,
    RAISING,
    WHAT,
    Case,
    fail_as,
)
from tests.alive.fault_ranks import Fate, run_ranks
from tests.dropin.scripts import SINGLE, make_batch, make_blocks, stages_of

RANKS = 4
MICROBATCHES = 8
CPU = torch.device("cpu")
SCHEDULES = ("1F1B", "ZBVZeroBubble")


class Trap(PipelineStage):
    """A stage of a client's own class, which springs at one microbatch."""

    kind = ""
    microbatch: int | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.kind != "raise in B" and fwd_chunk_id == self.microbatch:
            fail_as(self.kind)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if self.kind == "raise in B" and bwd_chunk_id == self.microbatch:
            fail_as(self.kind)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def make_stages(name: str, rank: int, ranks: int) -> list[Trap]:
    indices = stages_of(name, rank, ranks)
    blocks = make_blocks(ranks * len(indices))
    return [Trap(blocks[index], index, len(blocks), CPU) for index in indices]


def train_into_trap(rank: int, case: Case, folder: Path) -> str:
    stages: Any = make_stages(case.schedule, rank, RANKS)
    given = stages[0] if case.schedule in SINGLE else stages
    schedule = get_schedule_class(case.schedule)(given, MICROBATCHES, nn.functional.mse_loss)
    schedule.timeouts = ps.Timeouts(silence_seconds=case.silence_seconds, folder=folder)
    x, target = make_batch(2 * MICROBATCHES)
    is_last = any(stage.is_last for stage in stages)
    for step in range(3):
        stages[0].kind = case.kind
        is_set = rank == case.victim and step == case.step
        stages[0].microbatch = case.microbatch if is_set else None
        schedule.step(*((x,) if rank == 0 else ()), target=target if is_last else None)
    return "came through"


def check_case(case: Case, folder: Path) -> None:
    fates = run_ranks(train_into_trap, RANKS, folder, case, folder, resume=case.resume)
    if case.kind in RAISING:
        check_raised(case, fates)
    else:
        check_lost(case, fates)


def check_raised(case: Case, fates: list[Fate]) -> None:
    """Check that the rank that raised keeps its error, and all others name it and the action."""
    assert [fate.exit_code for fate in fates] == [1] * RANKS
    (stage, *_) = stages_of(case.schedule, case.victim, RANKS)
    actions = [f"{stage}{letter}{case.microbatch}" for letter in case.letters]
    for rank, fate in enumerate(fates):
        said = str(fate.reported)
        if rank == case.victim:
            assert (type(fate.reported), said) == (ValueError, MISTAKE)
        else:
            place = f"rank {case.victim}, stage {stage}, microbatch {case.microbatch}, "
            assert said.startswith(place)
            assert any(f"{action}: ValueError: {MISTAKE}" in said for action in actions)


def check_lost(case: Case, fates: list[Fate]) -> None:
    others = [fate for rank, fate in enumerate(fates) if rank != case.victim]
    assert [fate.exit_code for fate in others] == [1] * len(others)
    assert [type(fate.reported) for fate in others] == [ps.errors.PeerLostError] * len(others)
    (message,) = {str(fate.reported) for fate in others}
    first, last = message.splitlines()
    (stage, *_) = stages_of(case.schedule, case.victim, RANKS)
    assert first.startswith(f"rank {case.victim} (process ")
    assert WHAT[case.kind] in first
    assert f"; its last action was {stage}F{case.microbatch} (forward of " in first
    assert first.endswith(f" of step {case.step}")
    assert last.startswith("what every rank did: penstock explain ")
    assert fates[case.victim].exit_code == EXIT_CODES[case.kind]


FEW = [
    Case("1F1B", "raise in F", 1, 3),
    Case("ZBVZeroBubble", "raise in B", 2, 2),
    Case("ZBVZeroBubble", "SIGKILL", 0, 3),
    Case("1F1B", "SIGSTOP", 3, 0),
]
ALL_CASES = [
    Case(*values) for values in product(SCHEDULES, KINDS, range(RANKS), MICROBATCHES_OF_FAILURE)
]


@pytest.mark.parametrize("case", FEW, ids=str)
def test_others_end_and_name_the_rank(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL_CASES if case not in FEW], ids=str)
def test_others_end_and_name_the_rank_in_every_case(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def step_after_a_failure(rank: int, folder: Path) -> list[str]:
    """Run a step that fails on one rank, and the same one without the fault."""
    stages: Any = make_stages("1F1B", rank, 2)
    schedule = get_schedule_class("1F1B")(stages[0], 4, nn.functional.mse_loss)
    schedule.timeouts = ps.Timeouts(folder=folder)
    x, target = make_batch(8)
    said: list[str] = []
    stages[0].kind = "raise in F"
    for step in range(3):
        stages[0].microbatch = 2 if (rank, step) == (1, 1) else None
        try:
            schedule.step(*((x,) if rank == 0 else ()), target=target if rank else None)
            said.append("well")
        except (ps.errors.PipelineError, ValueError) as error:
            said.append(type(error).__name__)
            stages[0].submod.zero_grad()
    return said


def test_a_step_works_after_one_that_failed_on_a_single_rank(tmp_path: Path) -> None:
    # The drop-in left the other ranks waiting, and its shapes differed between ranks afterwards.
    fates = run_ranks(step_after_a_failure, 2, tmp_path, tmp_path)
    assert [fate.reported for fate in fates] == [
        ["well", "PipelineError", "well"],
        ["well", "ValueError", "well"],
    ]


class FailingLayer(nn.Module):
    """A layer that fails in one forward, counted over all steps."""

    def __init__(self, kind: str, call: int | None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.kind, self.call, self.calls = kind, call, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == self.call:
            fail_as(self.kind)
        self.calls += 1
        return self.layer(x)  # type: ignore[no-any-return]  # modules are untyped


def train_replica_into_trap(rank: int, kind: str, folder: Path) -> str:
    """Train two replicas of two stages; rank 3 fails in microbatch 2 of the second step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    group, index = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    layer = FailingLayer(kind, 4 + 2 if rank == RANKS - 1 else None)
    module = DistributedDataParallel(layer, process_group=mesh.get_group("replica"))
    stage = PipelineStage(module, index, 2, CPU, group=group)
    schedule = get_schedule_class("1F1B")(stage, 4, nn.functional.mse_loss)
    schedule.timeouts = ps.Timeouts(stop_seconds=1.0, folder=folder)
    x = torch.ones(8, 8)
    for _ in range(3):
        schedule.step(*([] if index else [x]), target=x if index else None)
    return "came through"


# The reduction of DDP waits in another pipeline, whose ranks have lost nobody of their own.
@pytest.mark.parametrize(
    "kind",
    [
        "SIGKILL",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("sys.exit", "raise in F")),
    ],
)
def test_all_replicas_of_a_program_name_the_rank(kind: str, tmp_path: Path) -> None:
    fates = run_ranks(train_replica_into_trap, RANKS, tmp_path, kind, tmp_path)
    others = fates if kind in RAISING else fates[:-1]
    assert [type(fate.reported) for fate in others] == [ps.errors.PeerLostError] * len(others)
    for fate in others:
        said = str(fate.reported)
        assert said.startswith(f"rank {RANKS - 1} (rank 1 of its pipeline, process ")
        assert WHAT.get(kind, MISTAKE) in said
