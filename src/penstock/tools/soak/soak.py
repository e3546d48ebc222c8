"""Case after case, for so many steps or so long: gradients, faults and leaks are checked."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic

from penstock.errors import ArgumentError
from penstock.ir.actions import Kind
from penstock.step.executor import Around
from penstock.tools.soak.cases import InjectedFault, SoakCase, draw_case
from penstock.tools.soak.leaks import Ledger, setting_aside
from penstock.tools.soak.world import WorkerAnswer, World
from penstock.tools.verify.reference import GradientError

__all__ = ["SoakProgress", "SoakRequest", "Summary", "soak"]

_TOLERANCE = 1e-10
# A case that takes longer hangs; so does a rank that has not told of a fault by then.
_MOST_SECONDS = 240.0
_MOST_SECONDS_WITH_FAULT = 120.0


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """What to run: for so many steps, for so many seconds, or one case that was run before."""

    seed: int = 0
    ranks: int = 4
    has_faults: bool = True
    steps: int | None = None
    seconds: float | None = None
    case: int | None = None

    def __post_init__(self) -> None:
        if [self.steps, self.seconds, self.case].count(None) != 2:
            raise ArgumentError(
                "say one of how many steps, how many seconds, and which case (steps: "
                f"{self.steps}, seconds: {self.seconds}, case: {self.case})"
            )

    @property
    def command(self) -> str:
        """The command that runs the same."""
        faults = "--faults" if self.has_faults else "--no-faults"
        command = f"penstock soak --seed {self.seed} --ranks {self.ranks} {faults}"
        if self.case is not None:
            return f"{command} --case {self.case}"
        if self.steps is not None:
            return f"{command} --steps {self.steps}"
        return f"{command} --minutes {(self.seconds or 0.0) / 60:g}"


@dataclass(frozen=True, slots=True)
class SoakProgress:
    """How far a soak has come; memory is that of the largest process, in bytes."""

    cases: int = 0
    steps: int = 0
    seconds: float = 0.0
    faults: int = 0
    worst: GradientError = GradientError(0.0, "")  # noqa: RUF009  # frozen
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a soak came to: how far it got, what went wrong first, and how to see that again."""

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

    `on_progress` hears of every case before it runs. `around` is put around the actions of every
    case in place of faults, to see that mistakes are found.
    """
    progress, ledger = SoakProgress(), Ledger()
    with World(request.ranks) as world, setting_aside():
        begin = monotonic()
        for case in _draw_cases(request):
            if _is_over(request, progress):
                break
            on_progress(case, progress)
            seconds = _MOST_SECONDS if case.fault is None else _MOST_SECONDS_WITH_FAULT
            answers = world.run(case, around=around, seconds=seconds)
            problem = _judge(case, answers)
            if problem:
                again = replace(request, case=case.number, steps=None, seconds=None)
                return Summary(progress, f"{case}: {problem}", again.command)
            progress = _add(progress, case, answers, monotonic() - begin)
            if case.fault is not None and case.fault.kind != "raise":
                world.replace(case.fault.rank)
            leaks = _find_leaks(answers, ledger)
            if leaks:
                again = replace(request, case=None, steps=progress.steps, seconds=None)
                return Summary(progress, f"{case}: {leaks}", again.command)
    return Summary(progress)


def _draw_cases(request: SoakRequest) -> Iterator[SoakCase]:
    for number in count() if request.case is None else [request.case]:
        yield draw_case(request.seed, number, ranks=request.ranks, has_faults=request.has_faults)


def _is_over(request: SoakRequest, progress: SoakProgress) -> bool:
    is_enough = request.steps is not None and progress.steps >= request.steps
    return is_enough or (request.seconds is not None and progress.seconds >= request.seconds)


def _judge(case: SoakCase, answers: list[WorkerAnswer | int | None]) -> str:
    """What is wrong with these answers, or nothing."""
    for rank, answer in enumerate(answers):
        if case.fault is None:
            problem = _judge_rank(answer)
        elif rank == case.fault.rank:
            problem = ""
        else:
            problem = _judge_survivor(case.fault, answer)
        if problem:
            return f"rank {rank}: {problem}" if case.uses_processes else problem
    return ""


def _judge_rank(answer: WorkerAnswer | int | None) -> str:
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


def _judge_survivor(fault: InjectedFault, answer: WorkerAnswer | int | None) -> str:
    """Whoever survives a fault says, in time, which rank it was and in what."""
    # Where a rank is dropped depends on its messages, so that any action may be its last.
    action = "" if fault.kind == "drop" else rf".*\b{fault.action}\b"
    match answer:
        case WorkerAnswer(findings=None) if re.search(
            rf"\brank {fault.rank}\b{action}", answer.error
        ):
            return ""
        case WorkerAnswer(findings=None):
            return f"it does not name rank {fault.rank} and {fault.action}: {answer.error}"
        case WorkerAnswer():
            return f"it has not noticed what happened to rank {fault.rank}"
        case _:
            return _judge_rank(answer)


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
        worst=max([progress.worst, *(found.worst for found in findings)]),
        memory=max([0, *(answer.footprint.resident_bytes for answer in given)]),
    )


def _find_leaks(answers: list[WorkerAnswer | int | None], ledger: Ledger) -> str:
    """What has leaked in the processes, or in this one."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, WorkerAnswer) and answer.leaks:
            return f"the process of rank {rank} leaks {', '.join(answer.leaks)}"
    ledger.settle()
    leaks = ledger.find_leaks()
    return f"the process that starts the others leaks {', '.join(leaks)}" if leaks else ""
