"""Many cases, in one process, in several at once or over gloo; what fails is made small."""

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.differential.case import Case, literal
from tests.differential.checking import Failure, check_case
from tests.differential.drawing import draw_case
from tests.differential.fleet import check_over_processes
from tests.differential.shrinking import shrink
from tests.processes import Processes

__all__ = ["Finding", "run_here", "run_in_workers", "run_over_processes", "seeds_of"]

# How many cases a worker, or a job of processes, is given at a time.
_CHUNK = 25


@dataclass(frozen=True, slots=True)
class Finding:
    """A seed whose case fails, the failure, and the small case that fails in the same way."""

    seed: int
    failure: Failure
    small: Case

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.failure.kind}\n{self.failure.text}\n"
            f"made small: {literal(self.small)}"
        )


def seeds_of(seed: int, cases: int) -> range:
    """Return the seeds of `cases` cases; another `seed` gives others."""
    return range(seed * 1_000_000, seed * 1_000_000 + cases)


def _chunks(seeds: Sequence[int]) -> Iterator[Sequence[int]]:
    return (seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK))


def run_here(seeds: Sequence[int]) -> Iterator[tuple[int, Finding | None]]:
    """Check one case after the other; each seed with what was found."""
    for seed in seeds:
        case = draw_case(seed)
        failure = check_case(case)
        yield seed, None if failure is None else Finding(seed, *_shrink_here(case, failure))


def _shrink_here(case: Case, failure: Failure) -> tuple[Failure, Case]:
    def fails_too(candidate: Case) -> bool:
        found = check_case(candidate)
        return found is not None and found.kind == failure.kind

    small = shrink(case, fails_too)
    return check_case(small) or failure, small


def run_in_workers(seeds: Sequence[int], workers: int) -> Iterator[tuple[int, Finding | None]]:
    """The same in several processes at once, each with cases of its own."""
    with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
        for found in pool.imap(_run_some, _chunks(seeds)):
            yield from found


def _run_some(seeds: Sequence[int]) -> list[tuple[int, Finding | None]]:
    return list(run_here(seeds))


def run_over_processes(
    seeds: Sequence[int], processes: Processes
) -> Iterator[tuple[int, Finding | None]]:
    """Check cases of which every rank is a process."""
    ranks = processes.num_ranks
    for some in _chunks(seeds):
        cases = [draw_case(seed, ranks=ranks) for seed in some]
        for case, failure in zip(cases, check_over_processes(processes, cases), strict=True):
            if failure is None:
                yield case.seed, None
            else:
                yield case.seed, Finding(case.seed, *_shrink_there(case, failure, processes))


def _shrink_there(case: Case, failure: Failure, processes: Processes) -> tuple[Failure, Case]:
    def fails_too(candidate: Case) -> bool:
        (found,) = check_over_processes(processes, [candidate])
        return found is not None and found.kind == failure.kind

    small = shrink(case, fails_too, ranks=processes.num_ranks)
    (again,) = check_over_processes(processes, [small])
    return again or failure, small
