"""What is wrong with the answers of processes to a case."""

import re
from collections.abc import Sequence
from typing import TypeAlias

from penstock.ranks.faults import EXIT_CODE
from penstock.tools.soak.cases import InjectedFault, SoakCase
from penstock.tools.soak.restarts import Start
from penstock.tools.soak.world import WorkerAnswer

__all__ = ["Answer", "find_ended", "problem_of_case", "problem_of_start"]

# What a process has found, the exit code with which it ended, or None if it did not answer.
Answer: TypeAlias = WorkerAnswer | int | None
_TOLERANCE = 1e-10


def problem_of_case(case: SoakCase, answers: Sequence[Answer]) -> str:
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


def _check_rank(answer: Answer) -> str:
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


def _check_survivor(case: SoakCase, fault: InjectedFault, answer: Answer) -> str:
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


def problem_of_start(start: Start, answers: Sequence[Answer]) -> str:
    """Return what is wrong with a start of an elastic case, or an empty text."""
    fault = start.fault
    for rank, answer in enumerate(answers):
        match answer:
            case _ if fault is not None and rank == fault.rank:
                continue
            case _ if fault is None:
                problem = _check_rank(answer)
            case WorkerAnswer(findings=None) if re.search(rf"\brank {fault.rank}\b", answer.error):
                continue
            case WorkerAnswer(findings=None):
                problem = f"it does not name rank {fault.rank}: {answer.error}"
            case WorkerAnswer():
                problem = f"it has not noticed what happened to rank {fault.rank}"
            case _:
                problem = _check_rank(answer)
        if problem:
            return f"rank {rank}: {problem}"
    return ""


def find_ended(answers: Sequence[Answer]) -> set[int]:
    """Return the ranks whose processes have ended."""
    return {rank for rank, answer in enumerate(answers) if isinstance(answer, int)}
