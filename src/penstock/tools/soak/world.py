"""Processes that run one case after the other, each a rank of a gloo group of its own per case.

They stay as long as they live. When one is lost in a case, the others must be fit for the next
case, and only the lost one is replaced.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.ir.actions import Kind
from penstock.step.step_data import Around
from penstock.tools.launcher import (
    Answered,
    Ended,
    Failed,
    WorkerContext,
    Workers,
    join_group,
    prepare_rank,
)
from penstock.tools.soak.cases import SoakCase
from penstock.tools.soak.leaks import Footprint, Ledger, ignoring_existing_objects
from penstock.tools.soak.steps import SoakFindings, run_case

__all__ = ["WorkerAnswer", "World"]


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
    """The processes of a soak; a context that leaves none of them behind."""

    def __init__(self, ranks: int) -> None:
        self._jobs = 0
        self._workers = Workers(ranks, prepare=_prepare, preload=[__name__])
        # What lost ranks leave behind.
        self._folder = TemporaryDirectory(prefix="penstock-soak-")

    def __enter__(self) -> "World":
        self._workers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.kill()
        self._folder.cleanup()

    def run(
        self, case: SoakCase, *, around: Mapping[Kind, Around] | None, seconds: float
    ) -> list[WorkerAnswer | int | None]:
        """Let the processes run a case, in one of them or as a rank each.

        Returns each one's answer, the exit code of one that ended, or None for one that the case
        has stopped or that has not answered in time.
        """
        self._jobs += 1
        members = case.num_processes
        job = _Job(self._jobs, case, around, seconds, Path(self._folder.name))
        for rank in range(members):
            self._workers.give(rank, partial(_run_job, job))
        silent = {rank for rank in range(members) if not _is_stopped(case, rank)}
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


def _is_stopped(case: SoakCase, rank: int) -> bool:
    return case.fault is not None and (case.fault.kind, case.fault.rank) == ("stop", rank)


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
        if not job.case.uses_processes:
            return run_case(job.case, None, around=job.around), ""
        return _run_as_rank(job, context), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _run_as_rank(job: _Job, context: WorkerContext) -> SoakFindings:
    join_group(context, job.case.num_processes, name=str(job.number), seconds=job.seconds)
    try:
        findings = run_case(job.case, dist.group.WORLD, around=job.around, folder=job.folder)
        # Nobody leaves while another still talks to it.
        dist.barrier()
        return findings
    finally:
        dist.destroy_process_group()
