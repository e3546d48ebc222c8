"""Real processes for tests: a few that stay, each a rank of a world, and are given jobs.

Starting one takes seconds, so that tests share them; every job gets a process group of its own.
A job that fails or takes too long ends all of its processes, and the next job starts new ones.

A world talks by gloo, or by NCCL with all ranks on one GPU: NCCL refuses two ranks on a device of
one host, so that each rank claims another host, and messages go over the loopback interface.
"""

import faulthandler
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from time import monotonic
from traceback import format_exc
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from penstock.tools.launcher import Answered, Ended, Failed, WorkerContext, Workers, join_group

__all__ = [
    "PRELOADED",
    "Backend",
    "JobFailedError",
    "Processes",
    "backend_of",
    "join_one_gpu",
    "start_server",
]

Backend: TypeAlias = Literal["gloo", "nccl"]

# How long the other ranks may still take after one has failed.
_GRACE_SECONDS = 5.0
# What a process answers: whether the job went well, and its result or its traceback.
_Answer: TypeAlias = tuple[bool, Any]
# What the server loads from which processes are forked.
PRELOADED = ("tests.preloaded",)


def start_server() -> None:
    """Start the server, unless it runs: only the first who starts it chooses what it loads."""
    forkserver.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()


class JobFailedError(AssertionError):
    """A job failed on some rank, or did not end in time; the message has every traceback."""


class Processes:
    """A world of processes; use it as a context, so that none is left behind."""

    def __init__(self, num_ranks: int, backend: Backend = "gloo") -> None:
        self.num_ranks = num_ranks
        self._backend = backend
        self._jobs = 0
        self._workers: Workers | None = None

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, job: Callable[..., Any], *args: Any, seconds: float = 240.0) -> list[Any]:
        """Call `job(rank, *args)` on every rank; what each returned, in order of rank.

        The job is a function at the top of a module, and its results can be pickled.
        """
        if self._workers is None:
            prepare = partial(_prepare, self._backend)
            self._workers = Workers(self.num_ranks, prepare=prepare, preload=PRELOADED)
            self._workers.__enter__()
        self._jobs += 1
        group = {"name": str(self._jobs), "seconds": seconds, "backend": self._backend}
        for rank in range(self.num_ranks):
            self._workers.give(rank, partial(_run_job, job, args, self.num_ranks, group))
        answers = self._collect(self._workers, seconds)
        if all(rank in answers and answers[rank][0] for rank in range(self.num_ranks)):
            return [answers[rank][1] for rank in range(self.num_ranks)]
        self.stop()
        raise JobFailedError(_describe(job.__name__, answers, self.num_ranks, seconds))

    def stop(self) -> None:
        """End every process, whatever it is doing."""
        if self._workers is not None:
            self._workers.kill()
            self._workers = None

    def _collect(self, workers: Workers, seconds: float) -> dict[int, _Answer]:
        """The answers that come in time; a process that ended answers with its exit code."""
        answers: dict[int, _Answer] = {}
        deadline = monotonic() + seconds
        while len(answers) < self.num_ranks and (left := deadline - monotonic()) > 0:
            silent = [rank for rank in range(self.num_ranks) if rank not in answers]
            for rank, message in workers.listen(silent, left):
                match message:
                    case Answered(answer):
                        answers[rank] = answer
                    case Failed(text):
                        answers[rank] = False, text
                    case Ended(code):
                        answers[rank] = False, f"the process ended with exit code {code}\n"
                if not answers[rank][0]:
                    deadline = min(deadline, monotonic() + _GRACE_SECONDS)
        return answers


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


@contextmanager
def _prepare(backend: Backend, rank: int) -> Iterator[torch.device | None]:
    """Let warnings be errors in a process; give it its device."""
    torch.set_num_threads(1)
    faulthandler.enable()
    warnings.simplefilter("error")
    device = None
    if backend == "nccl":
        # What other packages warn of on a GPU depends on their versions.
        warnings.simplefilter("default")
        warnings.filterwarnings("error", module="penstock")
        device = join_one_gpu(rank)
    yield device


def _run_job(
    job: Callable[..., Any],
    args: tuple[Any, ...],
    num_ranks: int,
    group: dict[str, Any],
    context: WorkerContext,
) -> _Answer:
    try:
        join_group(context, num_ranks, device=context.state, **group)
        result = job(context.rank, *args)
        # Nobody leaves while another still talks to it.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        # The process will be ended; leaving the group might wait for ranks that never come.
        return False, format_exc()
    return True, result
