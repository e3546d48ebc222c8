"""Jobs of several ranks that may fail or hang without ending the benchmark that runs them."""

import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from queue import Empty
from time import monotonic
from traceback import format_exc
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ranks_on_one_gpu import free_port, join, join_on_cpu

# What a job calls to say something to the process that started it.
Say: TypeAlias = Callable[[str, Any], None]
# What every rank runs: its number, its device, and `Say`.
Job: TypeAlias = Callable[[int, torch.device, Say], None]
_FAILED = "failed"
_SECONDS_TO_END = 10.0


class JobError(Exception):
    """A rank has failed, or all have been silent for too long."""


def run_job(
    job: Job,
    ranks: int,
    *,
    on_cpu: bool,
    silence: float,
    shares: Sequence[int] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Run a job on every rank, in new processes, and yield what the ranks say.

    With `shares`, each rank has its own percentage of the GPU under MPS.
    Raises a `JobError` if a rank fails or none says anything for `silence` seconds. No process is
    left behind.
    """
    context = get_context("spawn")
    said, port = context.Queue(), free_port()
    processes = [
        context.Process(
            target=_run_rank,
            args=(job, rank, port, ranks, on_cpu, said, shares and shares[rank]),
            daemon=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    heard = monotonic()
    try:
        while True:
            try:
                kind, value = said.get(timeout=0.5)
            except Empty:
                codes = [process.exitcode for process in processes]
                if all(code == 0 for code in codes):
                    return
                if any(codes):
                    raise JobError(f"ranks ended with exit codes {codes}") from None
                if monotonic() - heard > silence:
                    raise JobError(f"no progress for {silence:.0f} s") from None
                continue
            heard = monotonic()
            if kind == _FAILED:
                raise JobError(value)
            yield kind, value
    finally:
        for process in processes:
            process.kill()
            process.join(_SECONDS_TO_END)


def _run_rank(
    job: Job, rank: int, port: int, ranks: int, on_cpu: bool, said: Any, share: int | None
) -> None:
    try:
        if share is not None:
            os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share)
        device = (join_on_cpu if on_cpu else join)(rank, port, ranks)
        job(rank, device, lambda kind, value: said.put((kind, value)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        said.put((_FAILED, f"rank {rank}: {type(error).__name__}: {error}\n{format_exc()}"))
        # The other ranks may wait for this one for ever; whoever started them ends them.
        said.close()
        said.join_thread()
        raise SystemExit(1) from error
