"""A rank on a GPU raises or is killed: the others say so, and go on where they can."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.ir.actions import Action, Kind
from tests.alive.fault_ranks import run_ranks
from tests.gpu.problems import EQUAL, Twin, closing, make_batch, make_blocks, widths_of
from tests.models import make_stages, mean_loss
from tests.processes import Processes, backend_of

pytestmark = pytest.mark.gpu

FAMILIES = ("1F1B", "ZBV")
BACKWARDS = (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)


class Trap:
    """Runs a function at one microbatch of one rank, when it is set."""

    def __init__(self, is_here: bool, spring: Callable[[], None]) -> None:
        self.is_here, self.is_set = is_here, False
        self._spring = spring

    def __call__(self, action: Action, run: Callable[[], None]) -> None:
        if self.is_here and self.is_set and action.microbatch == 2:
            self._spring()
        run()


def fail() -> None:
    raise ValueError("out of luck")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make_pipeline(
    family: str, device: torch.device, trap: Trap, kinds: tuple[Kind, ...], **settings: Any
) -> tuple[Twin, ps.Pipeline]:
    ranks = dist.get_world_size()
    blocks = make_blocks(widths_of(2 * ranks, are_equal=True), device)
    pipeline = ps.Pipeline(
        make_stages(family, ranks, blocks),
        family,
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD,
        device=device,
        options=ps.RunOptions(around=dict.fromkeys(kinds, trap)),
        **settings,
    )
    return Twin.of(nn.Sequential(*blocks)), pipeline


def fail_and_go_on(rank: int, device: torch.device) -> list[tuple[str, str]]:
    """Every step but the failing ones is exact; where each failure was, and what was raised."""
    told = []
    for family in FAMILIES:
        for kinds in ((Kind.FORWARD,), BACKWARDS):
            trap = Trap(rank == 1, fail)
            twin, pipeline = make_pipeline(family, device, trap, kinds)
            with closing(pipeline):
                # While shapes are learned, after that, and with other ones.
                for number, rows in enumerate([8, 8, 8, 12, 12]):
                    batch = make_batch((rows, EQUAL), number, device)
                    trap.is_set = number in (0, 2, 3)
                    if trap.is_set:
                        with pytest.raises(ps.errors.PipelineError) as caught:
                            pipeline.step(*batch[:1], target=batch[1])
                        told.append((f"{family} {number}", str(caught.value).splitlines()[0]))
                        trap.is_set = False
                    assert twin.step(pipeline, *batch) == {}, (family, number)
    return told


def test_an_error_reaches_all_ranks_and_the_next_step_is_exact(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    first, second = two_ranks.run(fail_and_go_on, accelerator, seconds=120.0)
    assert first == second
    assert len(first) == 2 * 2 * 3
    for _, message in first:
        assert message.startswith("rank 1, stage ")
        assert message.endswith(": ValueError: out of luck")


def train_into_a_kill(rank: int, device: torch.device, folder: Path, step: int) -> str:
    trap = Trap(rank == 1, kill)
    timeouts = ps.Timeouts(silence_seconds=20.0, folder=folder)
    twin, pipeline = make_pipeline("1F1B", device, trap, (Kind.FORWARD,), timeouts=timeouts)
    for number in range(4):
        trap.is_set = number == step
        assert twin.step(pipeline, *make_batch((8, EQUAL), number, device)) == {}
    return "came through"


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_survivors_of_a_killed_rank_say_who_it_was(
    accelerator: torch.device, ranks: int, step: int, tmp_path: Path
) -> None:
    # Without MPS, under which the end of one client can take the others along.
    backend = backend_of(accelerator)
    fates = run_ranks(
        train_into_a_kill, ranks, tmp_path, accelerator, tmp_path, step, backend=backend
    )
    assert fates[1].exit_code == -signal.SIGKILL
    others = [fate.reported for rank, fate in enumerate(fates) if rank != 1]
    assert [type(told) for told in others] == [ps.errors.PeerLostError] * (ranks - 1), "\n\n".join(
        map(str, fates)
    )
    assert {told.rank for told in others} == {1}
    assert len({str(told) for told in others}) == 1
