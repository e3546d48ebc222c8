"""Healthy work that takes long, and processes that a debugger has stopped, are not lost."""

import math
import os
import signal
import subprocess
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from tests.alive.fault_ranks import run_ranks
from tests.models import make_batch, make_blocks, make_stages, mean_loss

# Far above the pauses of a busy machine, and the work takes far longer than that.
SILENCE_SECONDS, WORK_SECONDS = 8.0, 20.0
STOPPED_SECONDS = 5


class Slow(nn.Module):
    """A stage whose first forward computes in Python for long, as a compiler does."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        end, self.seconds = monotonic() + self.seconds, 0.0
        while monotonic() < end:
            sum(range(10_000))
        output: torch.Tensor = self.inner(value)
        return output


def make_pipeline(rank: int, timeouts: ps.Timeouts, seconds: float) -> ps.Pipeline:
    stages = make_stages("1F1B", 2, make_blocks())
    return ps.Pipeline(
        {rank: Slow(stages[rank], seconds if rank == 1 else 0.0)},
        "1F1B",
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD,
        timeouts=timeouts,
    )


def work_long(rank: int, folder: Path) -> list[str]:
    """Take long to load, to compile on one rank, and to get the second batch on the other."""
    timeouts = ps.Timeouts(SILENCE_SECONDS, stop_seconds=2.0, folder=folder)
    with ps.watching(timeouts=timeouts):
        if rank == 0:
            sleep(WORK_SECONDS)
        pipeline = make_pipeline(rank, timeouts, WORK_SECONDS)
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    if rank == 0:
        sleep(WORK_SECONDS)
    pipeline.step(batch, target=target)
    pipeline.close()
    return ["loaded", "compiled", "trained"]


@pytest.mark.slow
def test_long_work_is_not_a_loss(tmp_path: Path) -> None:
    fates = run_ranks(work_long, 2, tmp_path, tmp_path)
    assert [fate.reported for fate in fates] == [["loaded", "compiled", "trained"]] * 2, fates


def stop_for_a_while(rank: int, folder: Path) -> str:
    """Stop the process of a rank between two steps, as a debugger does."""
    pipeline = make_pipeline(rank, ps.Timeouts(math.inf, folder=folder), 0.0)
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    if rank == 1:
        command = f"sleep {STOPPED_SECONDS}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", command]):
            os.kill(os.getpid(), signal.SIGSTOP)
    pipeline.step(batch, target=target)
    pipeline.close()
    return "trained"


@pytest.mark.slow
def test_stopped_process_is_not_lost_where_silence_has_no_limit(tmp_path: Path) -> None:
    fates = run_ranks(stop_for_a_while, 2, tmp_path, tmp_path)
    assert [fate.reported for fate in fates] == ["trained"] * 2, fates
