"""Ranks killed while all restore: the others have the old state or the new one, in full."""

import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import PeerLostError
from tests.alive.fault_ranks import run_ranks

RANKS = 2
OLD, NEW = 2.0, 1.0
# About how many calls of functions of ours a restore makes on one rank.
_CALLS = 600


def make_pipeline(group: Any, folder: Path) -> ps.Pipeline:
    return ps.Pipeline(
        [nn.Linear(4, 4) for _ in range(RANKS)],
        "1F1B",
        microbatches=2,
        loss=nn.MSELoss(),
        group=group,
        timeouts=ps.Timeouts(silence_seconds=60, folder=folder),
    )


def fill(pipeline: ps.Pipeline, optimizer: torch.optim.Optimizer, number: float) -> None:
    """Set every number of the state, so that a mixture would be visible."""
    for tensor in pipeline.state_dict().values():
        tensor.fill_(number)
    for parameter in pipeline.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(number),
            "exp_avg": torch.full_like(parameter, number),
            "exp_avg_sq": torch.full_like(parameter, number),
        }
    for group in optimizer.param_groups:
        group["lr"] = number
    pipeline.random_step = int(number)
    torch.manual_seed(int(number))


def numbers_of(pipeline: ps.Pipeline, optimizer: torch.optim.Optimizer) -> set[float]:
    """Return all numbers of the state, and which seed the generator has."""
    tensors = list(pipeline.state_dict().values())
    for state in optimizer.state.values():
        tensors += state.values()
    found = {number for tensor in tensors for number in tensor.unique().tolist()}
    found |= {float(group["lr"]) for group in optimizer.param_groups} | {
        float(pipeline.random_step)
    }
    state = torch.get_rng_state()
    seeds = (n for n in (OLD, NEW) if torch.equal(torch.manual_seed(int(n)).get_state(), state))
    return found | set(seeds)


def die_at_function(number: int) -> None:
    """Kill this process when it calls one of the functions of checkpoints, by number."""
    calls = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event == "call" and "penstock/checkpoint/" in frame.f_code.co_filename:
            calls += 1
            if calls > number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(look)


def restore(rank: int, folder: Path, victim: int, number: int) -> list[float]:
    """Lose the victim while all restore; return the numbers of this rank's state."""
    pipeline = make_pipeline(dist.group.WORLD, folder)
    optimizer = torch.optim.Adam(pipeline.parameters())
    checkpoints = ps.Checkpoints(folder / "run")
    fill(pipeline, optimizer, NEW)
    if not checkpoints.steps():
        checkpoints.save(1, pipeline, optimizer, wait=True)
    dist.barrier()
    fill(pipeline, optimizer, OLD)
    if rank == victim:
        die_at_function(number)
    try:
        checkpoints.load(pipeline, optimizer)
    except PeerLostError:
        return sorted(numbers_of(pipeline, optimizer))
    finally:
        sys.setprofile(None)
    return sorted(numbers_of(pipeline, optimizer))


def kill_many(folder: Path, times: int) -> set[float]:
    """Kill ranks in restores; return which states the others had afterwards."""
    generator = random.Random(times)
    found = set()
    pipeline = make_pipeline(None, folder)
    optimizer = torch.optim.Adam(pipeline.parameters())
    for count in range(times):
        victim, number = count % RANKS, generator.randrange(_CALLS)
        fates = run_ranks(restore, RANKS, folder, folder, victim, number)
        state = fates[1 - victim].reported
        assert state in ([OLD], [NEW]), (number, fates)
        assert fates[victim].exit_code in (0, -signal.SIGKILL)
        found.add(state[0])
        # What was saved has not changed.
        fill(pipeline, optimizer, OLD)
        assert ps.Checkpoints(folder / "run").steps() == (1,)
        assert ps.Checkpoints(folder / "run").load(pipeline, optimizer) is not None
        assert {n for t in pipeline.state_dict().values() for n in t.unique().tolist()} == {NEW}
    return found


def test_rank_killed_while_restoring_leaves_the_others_whole(tmp_path: Path) -> None:
    kill_many(tmp_path, 2)


@pytest.mark.slow
def test_fifty_kills_while_restoring_leave_the_others_whole(tmp_path: Path) -> None:
    assert OLD in kill_many(tmp_path, 50)


def test_interrupt_changes_all_or_nothing(tmp_path: Path) -> None:
    # Ctrl-C after the agreement, when the optimizer had its state and the model had not.
    pipeline = make_pipeline(None, tmp_path)
    optimizer = torch.optim.Adam(pipeline.parameters())
    fill(pipeline, optimizer, NEW)
    ps.Checkpoints(tmp_path / "run").save(1, pipeline, optimizer, wait=True)
    found = set()
    for number in [*range(300, 700, 20), 10_000]:
        fill(pipeline, optimizer, OLD)
        interrupt_at_function(number)
        try:
            ps.Checkpoints(tmp_path / "run").load(pipeline, optimizer)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        state = numbers_of(pipeline, optimizer)
        assert state in ({OLD}, {NEW}), number
        found |= state
    assert found == {OLD, NEW}


def interrupt_at_function(number: int) -> None:
    calls = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event == "call" and "penstock/checkpoint/" in frame.f_code.co_filename:
            calls += 1
            if calls == number:
                raise KeyboardInterrupt

    sys.setprofile(look)
