"""Ranks that come to grief: real processes of which one fails, and what became of each.

They are forked from a server that has loaded torch, so that a world starts in a fraction of a
second. Every process has ended when `run_ranks` returns; one that had to be killed says so.
"""

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.processes import Backend, join_one_gpu

__all__ = ["Fate", "run_ranks"]

_HOST = "127.0.0.1"
# Far longer than anything takes: what ends in this time did not wait for a timeout of the group.
_LIMIT_SECONDS = 120.0
_GROUP_SECONDS = 3600.0
_PRELOADED = ["torch", "penstock.checkpoint.checkpoints", "tests.alive.fault_ranks"]


@dataclass(frozen=True)
class Fate:
    """What became of one process: what it told, how it ended, what it wrote to stderr.

    `told` is what its job returned, or the error that it raised, or nothing if it could not tell.
    """

    told: Any
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
    """Call `job(rank, *args)` in so many processes, and wait for all of them to end.

    The rank `resume` is expected to stop itself: it is told to go on once the ranks
    `resume_after` have ended, or all others if none are named.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        stderr = folder / f"stderr{rank}"
        given = (rank, num_ranks, backend, store.port, theirs, stderr, job, args)
        process = context.Process(target=_work, args=given)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        if resume is not None:
            others = [rank for rank in range(num_ranks) if rank != resume]
            _join([processes[rank] for rank in resume_after or others])
            _signal(processes[resume], signal.SIGCONT)
        _join(processes)
        return [
            _fate(processes[rank], pipes[rank], folder / f"stderr{rank}")
            for rank in range(num_ranks)
        ]
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


def _join(processes: Sequence[BaseProcess]) -> None:
    """Wait until all have ended, or too long."""
    deadline = monotonic() + _LIMIT_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - monotonic()))


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    assert process.pid is not None, "the process was started"
    os.kill(process.pid, number)


def _fate(process: BaseProcess, pipe: Connection, stderr: Path) -> Fate:
    told = None
    if wait([pipe], timeout=0):
        try:
            told = pickle.loads(pipe.recv_bytes())
        except EOFError:
            told = None
    return Fate(told, process.exitcode, stderr.read_text() if stderr.exists() else "")


def _work(
    rank: int,
    num_ranks: int,
    backend: Backend,
    port: int,
    pipe: Connection,
    stderr: Path,
    job: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    with stderr.open("wb") as file:
        os.dup2(file.fileno(), 2)
    store = PrefixStore("world", TCPStore(_HOST, port, is_master=False))
    limit = timedelta(seconds=_GROUP_SECONDS)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=limit,
        device_id=join_one_gpu(rank) if backend == "nccl" else None,
    )
    with _telling(pipe, backend) as told:
        told.append(job(rank, *args))
    dist.destroy_process_group()


@contextmanager
def _telling(pipe: Connection, backend: Backend) -> Iterator[list[Any]]:
    """Send what is put in the list, or what is raised instead."""
    told: list[Any] = []
    try:
        yield told
    except Exception as error:
        pipe.send_bytes(pickle.dumps(_portable(error)))
        if backend == "nccl":
            # Its threads may hold up the end of a process whose peer has gone.
            os._exit(1)
        sys.exit(1)
    pipe.send_bytes(pickle.dumps(told[0]))


def _portable(error: Exception) -> Exception:
    """The error, or one with its name and words if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
