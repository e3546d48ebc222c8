"""Processes that run one case after the other, each a rank of a gloo group of its own per case.

They stay as long as they live: of a case in which one is lost, the others must be fit for the
next, and only the lost one is replaced.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from tempfile import TemporaryDirectory
from time import monotonic

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from penstock.ir.actions import Kind
from penstock.step.executor import Around
from penstock.tools.soak.cases import SoakCase
from penstock.tools.soak.leaks import Footprint, Ledger, setting_aside
from penstock.tools.soak.steps import SoakFindings, run_case

__all__ = ["WorkerAnswer", "World"]

_HOST = "127.0.0.1"
_SECONDS_TO_END = 10.0


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """What a process says after a case: what it found, or its error; and what it holds."""

    findings: SoakFindings | None
    error: str
    footprint: Footprint
    leaks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    case: SoakCase
    around: Mapping[Kind, Around] | None
    seconds: float
    folder: Path


class World:
    """So many processes; use it as a context, so that none is left behind."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._jobs = 0
        self._processes: dict[int, ForkServerProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        # The store takes a free port itself, and keeps it; no other process can come between.
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        # What lost ranks leave behind.
        self._folder = TemporaryDirectory(prefix="penstock-soak-")

    def __enter__(self) -> "World":
        for rank in range(self._ranks):
            self._start(rank)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in list(self._processes):
            self._stop(rank)
        self._folder.cleanup()

    def run(
        self, case: SoakCase, *, around: Mapping[Kind, Around] | None, seconds: float
    ) -> list[WorkerAnswer | int | None]:
        """Let the processes run a case, in one of them or as a rank each.

        Gives each one's answer, the exit code of one that ended, or nothing for one that has not
        answered so many seconds later, or that the case has stopped.
        """
        self._jobs += 1
        members = case.schedule.num_ranks if case.uses_processes else 1
        for rank in range(members):
            job = _Job(self._jobs, case, around, seconds, Path(self._folder.name))
            self._pipes[rank].send(job)
        silent = {rank for rank in range(members) if not _is_stopped(case, rank)}
        answers: dict[int, WorkerAnswer | int] = {}
        deadline = monotonic() + seconds
        while silent and (left := deadline - monotonic()) > 0:
            heard = wait([self._pipes[rank] for rank in silent], left)
            for rank in [rank for rank in silent if self._pipes[rank] in heard]:
                answers[rank] = self._read(rank)
                silent.remove(rank)
        return [answers.get(rank) for rank in range(members)]

    def replace(self, rank: int) -> None:
        """End a process, whatever it is doing, and start another one in its place."""
        self._stop(rank)
        self._start(rank)

    def _start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work,
            args=(rank, self._store.port, theirs),
            name=f"penstock soak rank {rank}",
            daemon=True,
        )
        process.start()
        theirs.close()
        self._processes[rank], self._pipes[rank] = process, ours

    def _stop(self, rank: int) -> None:
        process = self._processes.pop(rank)
        process.kill()
        process.join()
        process.close()
        self._pipes.pop(rank).close()

    def _read(self, rank: int) -> WorkerAnswer | int:
        try:
            answer: WorkerAnswer = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_SECONDS_TO_END)
            return self._processes[rank].exitcode or 0
        return answer


def _is_stopped(case: SoakCase, rank: int) -> bool:
    return case.fault is not None and (case.fault.kind, case.fault.rank) == ("stop", rank)


def _work(rank: int, port: int, pipe: Connection) -> None:
    """What a process does: one case after the other, until its pipe is closed."""
    # Whoever started this process ends it; an interrupt from the keyboard is for them.
    signal(SIGINT, SIG_IGN)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = TCPStore(_HOST, port, is_master=False)
    ledger = Ledger()
    with setting_aside():
        while True:
            try:
                job: _Job = pipe.recv()
            except EOFError:
                return
            findings, error = _run(job, rank, store)
            del job
            footprint = ledger.settle()
            pipe.send(WorkerAnswer(findings, error, footprint, tuple(ledger.find_leaks())))


def _run(job: _Job, rank: int, store: Store) -> tuple[SoakFindings | None, str]:
    """What was found, or what went wrong."""
    try:
        if not job.case.uses_processes:
            return run_case(job.case, None, around=job.around), ""
        return _run_as_rank(job, rank, store), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _run_as_rank(job: _Job, rank: int, store: Store) -> SoakFindings:
    dist.init_process_group(
        "gloo",
        store=PrefixStore(str(job.number), store),
        rank=rank,
        world_size=job.case.schedule.num_ranks,
        timeout=timedelta(seconds=job.seconds),
    )
    try:
        findings = run_case(job.case, dist.group.WORLD, around=job.around, folder=job.folder)
        # Nobody leaves while another still talks to it.
        dist.barrier()
        return findings
    finally:
        dist.destroy_process_group()
