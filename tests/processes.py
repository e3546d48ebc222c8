"""Real processes for tests: a few that stay, each a rank of a gloo world, and are given jobs.

Starting one takes seconds, so that tests share them; every job gets a process group of its own.
A job that fails or takes too long ends all of its processes, and the next job starts new ones.
"""

import multiprocessing
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from time import monotonic
from traceback import format_exc
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["JobFailedError", "Processes"]

_HOST = "127.0.0.1"
# How long the other ranks may still take after one has failed.
_GRACE_SECONDS = 5.0
# What a process answers: whether the job went well, and its result or its traceback.
_Answer: TypeAlias = tuple[bool, Any]


class JobFailedError(AssertionError):
    """A job failed on some rank, or did not end in time; the message has every traceback."""


class Processes:
    """A world of processes; use it as a context, so that none is left behind."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
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
            arguments = (rank, self.num_ranks, self._store.port, theirs)
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


def _work(rank: int, num_ranks: int, port: int, pipe: Connection) -> None:
    """What a process does: one job after the other, until its pipe is closed."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = TCPStore(_HOST, port, is_master=False)
    while True:
        try:
            number, job, args, seconds = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        answer = _answer(rank, num_ranks, PrefixStore(str(number), store), job, args, seconds)
        pipe.send_bytes(pickle.dumps(answer))


def _answer(
    rank: int,
    num_ranks: int,
    store: Store,
    job: Callable[..., Any],
    args: tuple[Any, ...],
    seconds: float,
) -> _Answer:
    limit = timedelta(seconds=seconds)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit
        )
        try:
            result = job(rank, *args)
            # Nobody leaves while another still talks to it.
            dist.barrier()
            return True, result
        finally:
            dist.destroy_process_group()
    except BaseException:
        return False, format_exc()
