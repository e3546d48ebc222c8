"""What the demo learns: the plan against the best family, and predictions against recordings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from penstock import planner
from penstock.cli.reports import title
from penstock.sim.recorded.difference import Difference, find_difference
from penstock.units import format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.planner.plans import Plan
    from penstock.tools.demo.comparison import Result

__all__ = ["compare_with_family", "learn_and_show"]

_SECONDS_TO_REVISE = 1.0
_MOST_CAUSES = 3


def learn_and_show(
    console: Console, plan: Plan, planned: Result, rivals: Sequence[Result], *, memory: float
) -> str:
    """Say why steps took another time than predicted, and what a new plan would gain.

    Returns how the plan did against the fastest of its rivals that keep the memory limit.
    """
    title(console, "Learn: what was predicted, what was recorded, and what a new plan would gain")
    console.print(str(find_difference(plan.timeline, planned.recorded)), markup=False)
    revision = planner.revise(plan, planned.recorded, seconds=_SECONDS_TO_REVISE)
    console.print(str(revision), markup=False)
    if revision.remark:
        console.print(revision.remark, markup=False)
    fitting = [one for one in rivals if one.candidate.predicted.peak_bytes <= memory]
    if not fitting:
        return "no family keeps the memory limit, so the plan has no rival"
    outcome = compare_with_family(planned, min(fitting, key=lambda one: one.typical))
    console.print(outcome, markup=False)
    return outcome


def compare_with_family(planned: Result, family: Result) -> str:
    """Return who was faster, what was predicted, and why the outcome differs if it does."""
    name = family.candidate.name
    measured = family.typical / planned.typical - 1
    predicted = family.candidate.predicted.end_time / planned.candidate.predicted.end_time - 1
    variation = max(planned.spread, family.spread)
    if planned.candidate.schedule == family.candidate.schedule:
        return f"the plan runs in the order of {name}, the best family within the limit"
    if measured > variation:
        return (
            f"the plan was faster than {name}, the best family within the limit: {name} took "
            f"{format_share(measured)} longer (predicted: {format_share(predicted)})"
        )
    if measured >= -variation:
        return (
            f"the plan and {name}, the best family within the limit, are level within the noise: "
            f"{name} took {_signed_share(measured)} (predicted: {_signed_share(predicted)}), and "
            f"steps of one schedule vary by up to {format_share(variation)}"
        )
    return (
        f"{name}, the best family within the limit, was faster: it took {_signed_share(measured)} "
        f"(predicted: {_signed_share(predicted)}). {_explain(planned)}; {_explain(family)}"
    )


def _explain(result: Result) -> str:
    """Return by how much a recorded step missed its prediction, with the largest causes."""
    candidate = result.candidate
    found = find_difference(candidate.predicted, result.recorded)
    causes = ", ".join(
        f"{cause} {_milliseconds(found.by_cause[cause])}"
        for cause in list(found.sentences)[:_MOST_CAUSES]
    )
    return f"{candidate.name}: {_total(found)} than predicted ({causes or 'no cause'})"


def _total(found: Difference) -> str:
    word = "longer" if found.seconds >= 0 else "shorter"
    return f"{1e3 * abs(found.seconds):.1f} ms {word}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:+.1f} ms"


def _signed_share(share: float) -> str:
    """Return a share of time with the word for its sign.

    >>> _signed_share(0.031), _signed_share(-0.2)
    ('3.1 % longer', '20.0 % less')
    """
    return f"{format_share(abs(share))} {'longer' if share >= 0 else 'less'}"
