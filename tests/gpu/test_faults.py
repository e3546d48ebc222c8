"""A rank on a GPU raises: the others raise the same, and the next step is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.ir.actions import Action, Kind
from tests.gpu.problems import EQUAL, Twin, closing, make_batch, make_blocks, widths_of
from tests.models import make_stages, mean_loss
from tests.processes import Processes

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
