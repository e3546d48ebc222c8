"""Real processes for tests: a few that stay, each a rank of a world, and are given jobs.

Starting one takes seconds, so that tests share them; every job gets a process group of its own.
A job that fails or takes too long ends all of its processes, and the next job starts new ones.

A world talks by gloo, or by NCCL with all ranks on one GPU: NCCL refuses two ranks on a device of
one host, so that each rank claims another host, and messages go over the loopback interface.
"""

import faulthandler
import multiprocessing
import os
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from time import monotonic
from traceback import format_exc
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

__all__ = ["Backend", "JobFailedError", "Processes", "backend_of", "join_one_gpu"]

Backend: TypeAlias = Literal["gloo", "nccl"]

_HOST = "127.0.0.1"
# How long the other ranks may still take after one has failed.
_GRACE_SECONDS = 5.0
# What a process answers: whether the job went well, and its result or its traceback.
_Answer: TypeAlias = tuple[bool, Any]


class JobFailedError(AssertionError):
    """A job failed on some rank, or did not end in time; the message has every traceback."""


class Processes:
    """A world of processes; use it as a context, so that none is left behind."""

    def __init__(self, num_ranks: int, backend: Backend = "gloo") -> None:
        self.num_ranks = num_ranks
        self._backend = backend
        self._jobs = 0
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._store: TCPStore | None = None

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, job: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
        """Call `job(rank, *args)` on every rank; what each returned, in order of rank.

        The job is a function at the top of a module, and its results can be pickled.
        """
        if not self._processes:
            self._start()
        self._jobs += 1
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((self._jobs, job, args, seconds)))
        answers = self._collect(seconds)
        if all(rank in answers and answers[rank][0] for rank in range(self.num_ranks)):
            return [answers[rank][1] for rank in range(self.num_ranks)]
        self.stop()
        raise JobFailedError(_describe(job.__name__, answers, self.num_ranks, seconds))

    def stop(self) -> None:
        """End every process, whatever it is doing."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        # The store takes a free port itself, and keeps it; no other process can come between.
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, self.num_ranks, self._backend, self._store.port, theirs)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, seconds: float) -> dict[int, _Answer]:
        """The answers that come in time; a process that ended answers with its exit code."""
        answers: dict[int, _Answer] = {}
        deadline = monotonic() + seconds
        while len(answers) < self.num_ranks and (left := deadline - monotonic()) > 0:
            waiting = {self._pipes[r]: r for r in range(self.num_ranks) if r not in answers}
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting[pipe]  # type: ignore[index]  # only connections were given
                answers[rank] = self._read(rank)
                if not answers[rank][0]:
                    deadline = min(deadline, monotonic() + _GRACE_SECONDS)
        return answers

    def _read(self, rank: int) -> _Answer:
        try:
            answer: _Answer = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self._processes[rank].join(_GRACE_SECONDS)
            return False, f"the process ended with exit code {self._processes[rank].exitcode}\n"
        return answer


def _describe(job: str, answers: dict[int, _Answer], num_ranks: int, seconds: float) -> str:
    lines = [f"{job} failed"]
    for rank in range(num_ranks):
        is_well, content = answers.get(rank, (False, f"no answer after {seconds} seconds\n"))
        lines.append(f"rank {rank}: ended well" if is_well else f"rank {rank}: {content}")
    return "\n".join(lines)


def backend_of(device: torch.device) -> Backend:
    """What ranks talk by whose tensors are on this device."""
    return "nccl" if device.type == "cuda" else "gloo"


def join_one_gpu(rank: int) -> torch.device:
    """Let this process be a rank that shares the GPU; before its first communicator."""
    os.environ.update(
        NCCL_HOSTID=f"rank{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
    )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def _work(rank: int, num_ranks: int, backend: Backend, port: int, pipe: Connection) -> None:
    """What a process does: one job after the other, until its pipe is closed."""
    torch.set_num_threads(1)
    faulthandler.enable()
    warnings.simplefilter("error")
    device = None
    if backend == "nccl":
        # What other packages warn of on a GPU depends on their versions.
        warnings.simplefilter("default")
        warnings.filterwarnings("error", module="penstock")
        device = join_one_gpu(rank)
    store = TCPStore(_HOST, port, is_master=False)
    while True:
        try:
            number, job, args, seconds = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        start = partial(
            dist.init_process_group,
            backend,
            store=PrefixStore(str(number), store),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=seconds),
            device_id=device,
        )
        answer = _answer(start, rank, job, args)
        pipe.send_bytes(pickle.dumps(answer))


def _answer(
    start: Callable[[], None], rank: int, job: Callable[..., Any], args: tuple[Any, ...]
) -> _Answer:
    try:
        start()
        result = job(rank, *args)
        # Nobody leaves while another still talks to it.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        # The process will be ended; leaving the group might wait for ranks that never come.
        return False, format_exc()
    return True, result
