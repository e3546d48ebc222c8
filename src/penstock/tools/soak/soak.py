"""A soak: case after case, in which gradients, faults, restarts and leaks are checked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from time import monotonic
from typing import TypeAlias

from penstock.errors import ArgumentError
from penstock.ir.actions import Kind
from penstock.step.step_data import Around
from penstock.tools.soak.cases import SoakCase, draw_case
from penstock.tools.soak.elastic_steps import run_start
from penstock.tools.soak.leaks import Ledger, ignoring_existing_objects
from penstock.tools.soak.outcomes import Answer, find_ended, problem_of_case, problem_of_start
from penstock.tools.soak.restarts import ElasticCase, draw_elastic_case
from penstock.tools.soak.steps import run_case
from penstock.tools.soak.world import CaseWork, WorkerAnswer, World
from penstock.tools.verify.reference import GradientError

__all__ = ["AnyCase", "SoakProgress", "SoakRequest", "Summary", "soak"]

# A case that takes longer hangs, and so does a rank that has not reported a fault by then.
_MOST_SECONDS = 240.0
_MOST_SECONDS_WITH_FAULT = 120.0

AnyCase: TypeAlias = SoakCase | ElasticCase


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
    restored: int = 0
    restarts: int = 0
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
    on_progress: Callable[[AnyCase, SoakProgress], None] = lambda _case, _progress: None,
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
            match case:
                case SoakCase():
                    outcome = _run_case(world, case, around)
                case ElasticCase():
                    outcome = _run_starts(world, case)
            if outcome.problem:
                again = replace(request, case=case.number, steps=None, seconds=None)
                return Summary(progress, f"{case}: {outcome.problem}", again.command)
            progress = replace(_add(progress, case, outcome.answers), seconds=monotonic() - begin)
            world.clean()
            world.wait_until_ready()
            leaks = _find_leaks(outcome.answers, ledger)
            if leaks:
                again = replace(request, case=None, steps=progress.steps, seconds=None)
                return Summary(progress, f"{case}: {leaks}", again.command)
    return Summary(progress)


@dataclass(slots=True)
class _Outcome:
    """What all processes have answered in a case, with their ranks, and what is wrong with it."""

    answers: list[tuple[int, Answer]] = field(default_factory=list)
    problem: str = ""


def _run_case(world: World, case: SoakCase, around: Mapping[Kind, Around] | None) -> _Outcome:
    fault = case.fault
    stopped = fault.rank if fault is not None and fault.kind == "stop" else None
    work = CaseWork(
        case.num_processes, case.uses_processes, partial(run_case, case, around), stopped
    )
    seconds = _MOST_SECONDS if fault is None else _MOST_SECONDS_WITH_FAULT
    answers = world.run(work, seconds=seconds)
    is_gone = fault is not None and fault.kind != "raise"
    _replace_ended(world, answers, [fault.rank] if is_gone and fault is not None else [])
    return _Outcome(list(enumerate(answers)), problem_of_case(case, answers))


def _run_starts(world: World, case: ElasticCase) -> _Outcome:
    """Train until the last step, with a start after every fault."""
    outcome = _Outcome()
    for number, start in enumerate(case.starts):
        fault = start.fault
        stopped = fault.rank if fault is not None and fault.kind == "stop" else None
        work = CaseWork(start.ranks, True, partial(run_start, case, number), stopped)
        answers = world.run(work, seconds=_MOST_SECONDS)
        _replace_ended(world, answers, [] if fault is None else [fault.rank])
        outcome.answers += enumerate(answers)
        outcome.problem = problem_of_start(start, answers)
        if outcome.problem:
            break
    return outcome


def _replace_ended(world: World, answers: Sequence[Answer], lost: Sequence[int]) -> None:
    """Start processes in place of those that a fault has ended or stopped."""
    for rank in sorted(find_ended(answers) | set(lost)):
        world.replace(rank)


def _draw_cases(request: SoakRequest) -> Iterator[AnyCase]:
    for number in count() if request.case is None else [request.case]:
        seed, ranks, has_faults = request.seed, request.ranks, request.has_faults
        elastic = draw_elastic_case(seed, number, ranks=ranks, has_faults=has_faults)
        if elastic is not None:
            yield elastic
        else:
            yield draw_case(seed, number, ranks=ranks, has_faults=has_faults)


def _is_over(request: SoakRequest, progress: SoakProgress) -> bool:
    is_enough = request.steps is not None and progress.steps >= request.steps
    return is_enough or (request.seconds is not None and progress.seconds >= request.seconds)


def _add(
    progress: SoakProgress, case: AnyCase, answers: Sequence[tuple[int, Answer]]
) -> SoakProgress:
    given = [answer for _, answer in answers if isinstance(answer, WorkerAnswer)]
    findings = [answer.findings for answer in given if answer.findings is not None]
    added = replace(
        progress,
        cases=progress.cases + 1,
        steps=progress.steps + max((found.steps for found in findings), default=0),
        worst=max([progress.worst, *(found.worst for found in findings)]),
        memory=max([progress.memory, *(answer.footprint.resident_bytes for answer in given)]),
    )
    match case:
        case ElasticCase():
            faults = sum(start.fault is not None for start in case.starts)
            restarts = len(case.starts) - 1
            return replace(added, faults=added.faults + faults, restarts=added.restarts + restarts)
        case SoakCase():
            is_restored = case.fault is None and case.saved_after is not None
            return replace(
                added,
                faults=added.faults + (case.fault is not None),
                replicated=added.replicated + (case.replicas > 1),
                by_order=added.by_order + case.fault_injection.by_order,
                restored=added.restored + is_restored,
            )


def _find_leaks(answers: Sequence[tuple[int, Answer]], ledger: Ledger) -> str:
    """Return what has leaked in the processes or in this one, or an empty text."""
    for rank, answer in answers:
        if isinstance(answer, WorkerAnswer) and answer.leaks:
            return f"the process of rank {rank} leaks {', '.join(answer.leaks)}"
    ledger.settle()
    leaks = ledger.find_leaks()
    return f"the process that starts the others leaks {', '.join(leaks)}" if leaks else ""
