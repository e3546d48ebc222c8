"""Ranks of which one fails: real processes, and how each of them ended.

Every process has ended when `run_ranks` returns; one that had to be killed has no exit code.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock.tools.launcher import Reported, WorkerContext, Workers, join_group
from tests.processes import PRELOADED, Backend, join_one_gpu

__all__ = ["Fate", "run_ranks"]

# Far longer than anything takes: what ends in this time did not wait for a timeout of the group.
_LIMIT_SECONDS = 300.0
_GROUP_SECONDS = 3600.0


@dataclass(frozen=True)
class Fate:
    """How one process ended: what it reported, its exit code, and what it wrote to stderr.

    `reported` is what its job returned or the error that it raised; None if it reported neither.
    """

    reported: Any
    exit_code: int | None
    stderr: str


def run_ranks(
    job: Callable[..., Any],
    num_ranks: int,
    folder: Path,
    *args: Any,
    resume: int | None = None,
    resume_after: Sequence[int] = (),
    backend: Backend = "gloo",
) -> list[Fate]:
    """Call `job(rank, *args)` in a process for each rank, and wait for all of them to end.

    The rank `resume` is expected to stop itself: it is continued once the ranks `resume_after`
    have ended, or all others if none are named.
    """
    ranks = range(num_ranks)
    with Workers(num_ranks, preload=PRELOADED) as workers:
        for rank in ranks:
            stderr = folder / f"stderr{rank}"
            workers.give(rank, partial(_run_and_end, job, args, num_ranks, backend, stderr))
        if resume is not None:
            others = [rank for rank in ranks if rank != resume]
            workers.wait_for_end(resume_after or others, _LIMIT_SECONDS)
            workers.send_signal(resume, signal.SIGCONT)
        codes = workers.wait_for_end(ranks, _LIMIT_SECONDS)
        fates = [_fate(workers, rank, codes[rank], folder / f"stderr{rank}") for rank in ranks]
        workers.kill()
        return fates


def _fate(workers: Workers, rank: int, exit_code: int | None, stderr: Path) -> Fate:
    reported = None
    match workers.listen([rank], 0.0):
        case [(_, Reported(value))]:
            reported = value
    return Fate(reported, exit_code, stderr.read_text() if stderr.exists() else "")


def _run_and_end(
    job: Callable[..., Any],
    args: tuple[Any, ...],
    num_ranks: int,
    backend: Backend,
    stderr: Path,
    context: WorkerContext,
) -> None:
    """Run a job as a program would: report what it returns or raises, and end the process."""
    with stderr.open("wb") as file:
        os.dup2(file.fileno(), 2)
    device = join_one_gpu(context.rank) if backend == "nccl" else None
    join_group(
        context, num_ranks, name="world", seconds=_GROUP_SECONDS, backend=backend, device=device
    )
    try:
        reported = job(context.rank, *args)
    except Exception as error:
        context.report(_portable(error))
        if backend == "nccl":
            # Its threads may hold up the end of a process whose peer has gone.
            os._exit(1)
        sys.exit(1)
    context.report(reported)
    dist.destroy_process_group()
    sys.exit(0)


def _portable(error: Exception) -> Exception:
    """Return the error, or one with its name and message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
