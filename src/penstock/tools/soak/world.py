"""Processes that run one case after the other, each a rank of a gloo group of its own per case.

They stay as long as they live. When one is lost in a case, the others must be fit for the next
case, and only the lost one is replaced.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.tools.launcher import (
    Answered,
    Ended,
    Failed,
    WorkerContext,
    Workers,
    join_group,
    prepare_rank,
)
from penstock.tools.soak.leaks import Footprint, Ledger, ignoring_existing_objects
from penstock.tools.soak.steps import SoakFindings

__all__ = ["CaseWork", "WorkerAnswer", "World"]

# Far longer than a process takes to start, on a busy machine too.
_SECONDS_TO_START = 120.0


@dataclass(frozen=True, slots=True)
class CaseWork:
    """What processes do in a case: `run` gets the group of all of them, and a folder.

    Without `has_group` there is one process, which is not a rank of anything. `stopped` is a rank
    that stops itself, so that no answer is expected.
    """

    processes: int
    has_group: bool
    run: Callable[[dist.ProcessGroup | None, Path], SoakFindings]
    stopped: int | None = None


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
    work: CaseWork
    seconds: float
    folder: Path


class World:
    """The processes of a soak; a context that leaves none of them behind."""

    def __init__(self, ranks: int) -> None:
        self._jobs = 0
        self._workers = Workers(ranks, prepare=_prepare, preload=[__name__])
        # Processes that have done nothing yet.
        self._new = set(range(ranks))
        # What lost ranks leave behind.
        self._folder = TemporaryDirectory(prefix="penstock-soak-")

    def __enter__(self) -> "World":
        self._workers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.kill()
        self._folder.cleanup()

    def run(self, work: CaseWork, *, seconds: float) -> list[WorkerAnswer | int | None]:
        """Let the processes do their work.

        Returns each one's answer, the exit code of one that ended, or None for one that was
        stopped or that has not answered in time.
        """
        self._jobs += 1
        members = work.processes
        job = _Job(self._jobs, work, seconds, Path(self._folder.name))
        for rank in range(members):
            self._workers.give(rank, partial(_run_job, job))
        silent = {rank for rank in range(members) if rank != work.stopped}
        answers: dict[int, WorkerAnswer | int] = {}
        deadline = monotonic() + seconds
        while silent and (left := deadline - monotonic()) > 0:
            for rank, message in self._workers.listen(silent, left):
                match message:
                    case Answered(value):
                        answers[rank] = value
                    case Ended(code):
                        answers[rank] = code
                    case Failed(text):
                        raise PipelineError(f"rank {rank} could not run a case: {text}")
                silent.discard(rank)
        return [answers.get(rank) for rank in range(members)]

    def replace(self, rank: int) -> None:
        """End a process, whatever it is doing, and start another one in its place."""
        self._workers.replace(rank)
        self._new.add(rank)

    def wait_until_ready(self) -> None:
        """Wait until every process is connected, which takes an open file of this one."""
        for rank in self._new:
            self._workers.give(rank, _answer)
        while self._new:
            heard = self._workers.listen(self._new, _SECONDS_TO_START)
            if not heard:
                raise PipelineError(f"ranks {sorted(self._new)} have not started in time")
            for rank, message in heard:
                if not isinstance(message, Answered):
                    raise PipelineError(f"rank {rank} could not start: {message}")
                self._new.discard(rank)

    def clean(self) -> None:
        """Remove what the processes have written, once none of them writes any more."""
        for path in Path(self._folder.name).iterdir():
            shutil.rmtree(path)


def _answer(_: WorkerContext) -> None:
    """Do nothing but answer."""


@contextmanager
def _prepare(rank: int) -> Iterator[Ledger]:
    """Give a process a ledger of what it holds after each case."""
    with prepare_rank(rank):
        warnings.simplefilter("error")
        with ignoring_existing_objects():
            yield Ledger()


def _run_job(job: _Job, context: WorkerContext) -> WorkerAnswer:
    findings, error = _run(job, context)
    ledger: Ledger = context.state
    footprint = ledger.settle()
    return WorkerAnswer(findings, error, footprint, tuple(ledger.find_leaks()))


def _run(job: _Job, context: WorkerContext) -> tuple[SoakFindings | None, str]:
    """Return what was found, or what went wrong."""
    try:
        if not job.work.has_group:
            return job.work.run(None, job.folder), ""
        return _run_as_rank(job, context), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _run_as_rank(job: _Job, context: WorkerContext) -> SoakFindings:
    join_group(context, job.work.processes, name=str(job.number), seconds=job.seconds)
    try:
        findings = job.work.run(dist.group.WORLD, job.folder)
        # Nobody leaves while another still talks to it.
        dist.barrier()
        return findings
    finally:
        dist.destroy_process_group()
