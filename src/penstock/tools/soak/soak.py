"""A soak: case after case, in which gradients, faults and leaks are checked."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic

from penstock.errors import ArgumentError
from penstock.ir.actions import Kind
from penstock.ranks.faults import EXIT_CODE
from penstock.step.step_data import Around
from penstock.tools.soak.cases import InjectedFault, SoakCase, draw_case
from penstock.tools.soak.leaks import Ledger, ignoring_existing_objects
from penstock.tools.soak.world import WorkerAnswer, World
from penstock.tools.verify.reference import GradientError

__all__ = ["SoakProgress", "SoakRequest", "Summary", "soak"]

_TOLERANCE = 1e-10
# A case that takes longer hangs, and so does a rank that has not reported a fault by then.
_MOST_SECONDS = 240.0
_MOST_SECONDS_WITH_FAULT = 120.0


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """What to run: a number of steps, a number of seconds, or one case that was run before."""

    seed: int = 0
    ranks: int = 4
    has_faults: bool = True
    steps: int | None = None
    seconds: float | None = None
    case: int | None = None

    def __post_init__(self) -> None:
        if [self.steps, self.seconds, self.case].count(None) != 2:
            raise ArgumentError(
                "exactly one of steps, seconds and case must be given (got steps: "
                f"{self.steps}, seconds: {self.seconds}, case: {self.case})"
            )

    @property
    def command(self) -> str:
        """The command line that runs the same."""
        faults = "--faults" if self.has_faults else "--no-faults"
        command = f"penstock soak --seed {self.seed} --ranks {self.ranks} {faults}"
        if self.case is not None:
            return f"{command} --case {self.case}"
        if self.steps is not None:
            return f"{command} --steps {self.steps}"
        return f"{command} --minutes {(self.seconds or 0.0) / 60:g}"


@dataclass(frozen=True, slots=True)
class SoakProgress:
    """The progress of a soak; `memory` is that of the largest process, in bytes."""

    cases: int = 0
    steps: int = 0
    seconds: float = 0.0
    faults: int = 0
    replicated: int = 0
    by_order: int = 0
    worst: GradientError = GradientError(0.0, "")  # noqa: RUF009  # frozen
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a soak: its progress, the first problem, and the command that repeats it."""

    progress: SoakProgress
    problem: str = ""
    command: str = ""


def soak(
    request: SoakRequest,
    on_progress: Callable[[SoakCase, SoakProgress], None] = lambda _case, _progress: None,
    *,
    around: Mapping[Kind, Around] | None = None,
) -> Summary:
    """Run cases until there are enough, or until one goes wrong.

    `on_progress` is called with every case before it runs. `around` wraps the actions of every
    case in place of faults, to show that mistakes are found.
    """
    progress, ledger = SoakProgress(), Ledger()
    with World(request.ranks) as world, ignoring_existing_objects():
        begin = monotonic()
        for case in _draw_cases(request):
            if _is_over(request, progress):
                break
            on_progress(case, progress)
            seconds = _MOST_SECONDS if case.fault is None else _MOST_SECONDS_WITH_FAULT
            answers = world.run(case, around=around, seconds=seconds)
            problem = _check_answers(case, answers)
            if problem:
                again = replace(request, case=case.number, steps=None, seconds=None)
                return Summary(progress, f"{case}: {problem}", again.command)
            progress = _add(progress, case, answers, monotonic() - begin)
            for rank in _find_lost(case, answers):
                world.replace(rank)
            leaks = _find_leaks(answers, ledger)
            if leaks:
                again = replace(request, case=None, steps=progress.steps, seconds=None)
                return Summary(progress, f"{case}: {leaks}", again.command)
    return Summary(progress)


def _find_lost(case: SoakCase, answers: list[WorkerAnswer | int | None]) -> list[int]:
    """Return the ranks whose processes a fault has ended or stopped."""
    lost = {rank for rank, answer in enumerate(answers) if isinstance(answer, int)}
    if case.fault is not None and case.fault.kind != "raise":
        lost.add(case.fault.rank)
    return sorted(lost)


def _draw_cases(request: SoakRequest) -> Iterator[SoakCase]:
    for number in count() if request.case is None else [request.case]:
        yield draw_case(request.seed, number, ranks=request.ranks, has_faults=request.has_faults)


def _is_over(request: SoakRequest, progress: SoakProgress) -> bool:
    is_enough = request.steps is not None and progress.steps >= request.steps
    return is_enough or (request.seconds is not None and progress.seconds >= request.seconds)


def _check_answers(case: SoakCase, answers: list[WorkerAnswer | int | None]) -> str:
    """Return what is wrong with these answers, or an empty text."""
    for rank, answer in enumerate(answers):
        if case.fault is None:
            problem = _check_rank(answer)
        elif rank == case.fault.rank:
            problem = ""
        else:
            problem = _check_survivor(case, case.fault, answer)
        if problem:
            return f"rank {rank}: {problem}" if case.uses_processes else problem
    return ""


def _check_rank(answer: WorkerAnswer | int | None) -> str:
    match answer:
        case None:
            return "no answer in time"
        case int():
            return f"its process ended with exit code {answer}"
        case WorkerAnswer(findings=None):
            return answer.error
        case WorkerAnswer(findings=findings):
            assert findings is not None, "the case before"
            if not findings.worst.error <= _TOLERANCE:
                return f"{findings.worst.name} is off by {findings.worst.error:.1e}"
            return ""


def _check_survivor(
    case: SoakCase, fault: InjectedFault, answer: WorkerAnswer | int | None
) -> str:
    """Return whether a survivor failed to name, in time, the rank and the action of the fault."""
    # A rank is dropped at a message, so that any action may be its last.
    action = "" if fault.kind == "drop" else rf".*\b{fault.action}\b"
    match answer:
        case int(code) if code == EXIT_CODE and case.replicas > 1:
            # It was in a collective of DDP, which cannot be aborted; stderr says who is lost.
            return ""
        case WorkerAnswer(findings=None) if re.search(
            rf"\brank {fault.rank}\b{action}", answer.error
        ):
            return ""
        case WorkerAnswer(findings=None):
            return f"it does not name rank {fault.rank} and {fault.action}: {answer.error}"
        case WorkerAnswer():
            return f"it has not noticed what happened to rank {fault.rank}"
        case _:
            return _check_rank(answer)


def _add(
    progress: SoakProgress,
    case: SoakCase,
    answers: list[WorkerAnswer | int | None],
    seconds: float,
) -> SoakProgress:
    given = [answer for answer in answers if isinstance(answer, WorkerAnswer)]
    findings = [answer.findings for answer in given if answer.findings is not None]
    return SoakProgress(
        cases=progress.cases + 1,
        steps=progress.steps + max((found.steps for found in findings), default=0),
        seconds=seconds,
        faults=progress.faults + (case.fault is not None),
        replicated=progress.replicated + (case.replicas > 1),
        by_order=progress.by_order + case.fault_injection.by_order,
        worst=max([progress.worst, *(found.worst for found in findings)]),
        memory=max([0, *(answer.footprint.resident_bytes for answer in given)]),
    )


def _find_leaks(answers: list[WorkerAnswer | int | None], ledger: Ledger) -> str:
    """Return what has leaked in the processes or in this one, or an empty text."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, WorkerAnswer) and answer.leaks:
            return f"the process of rank {rank} leaks {', '.join(answer.leaks)}"
    ledger.settle()
    leaks = ledger.find_leaks()
    return f"the process that starts the others leaks {', '.join(leaks)}" if leaks else ""
