"""Checks one case: runs it both ways, and says what is wrong."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from traceback import format_exception_only

import torch
import torch.distributed as dist

from tests.differential.case import Case
from tests.differential.comparing import differences
from tests.differential.observed import Numbers
from tests.differential.refusals import find_refusals
from tests.differential.running import run_split, run_unsplit
from tests.differential.sensitivity import spread_of

__all__ = ["Failure", "check_case", "forget_compiled"]

_MOST_LINES = 8


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong: `kind` is one word for it, by which shrinking knows it again."""

    kind: str
    text: str


def check_case(case: Case, group: dist.ProcessGroup | None = None) -> Failure | None:
    """Run a case as a pipeline and as one model; what differs, if anything does."""
    refusals = find_refusals(case, is_over_processes=group is not None)
    expected: Numbers | None = None
    if all(refusal.may_work for refusal in refusals):
        try:
            expected = run_unsplit(case)
        except Exception as error:
            return Failure("invalid case", f"the plain model fails: {_words(error)}")
    try:
        found = run_split(case, group)
    except Exception as error:
        if any(refusal.covers(error) for refusal in refusals):
            return None
        return Failure(_kind(error), f"the pipeline fails: {_words(error)}")
    finally:
        if "compiled" in case.traits:
            forget_compiled()
    if expected is None:
        return Failure("not refused", f"nothing was raised of {refusals}")
    wrong = _judge(case, found, expected)
    return Failure("wrong numbers", _table(wrong)) if wrong else None


def _judge(case: Case, found: Numbers, expected: Numbers) -> dict[str, str]:
    """What differs by more than rounding explains; only a difference is worth more runs."""
    wrong = differences(found, expected)
    if wrong:
        wrong = differences(found, expected, spread_of(case, expected))
        if "compiled" in case.traits:
            forget_compiled()
    return wrong


def forget_compiled() -> None:
    """Let the compiler forget all code that it has compiled.

    The first time in a process this imports inductor, which in some versions of torch uses what
    torch itself has deprecated.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit\.", DeprecationWarning)
        torch._dynamo.reset()


def _kind(error: BaseException) -> str:
    """The innermost cause, since a pipeline names a place around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error).__name__


def _words(error: BaseException) -> str:
    return "".join(format_exception_only(error)).strip()


def _table(wrong: Mapping[str, str]) -> str:
    lines = [f"{name}: {words}" for name, words in wrong.items()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more"]
    return "\n".join(lines)
