"""The result of a search: the best plans side by side, and why the others are slower."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from penstock.planner.limits import count_bytes
from penstock.planner.plans import Plan
from penstock.planner.search.breakdown import Breakdown, break_down, why_slower
from penstock.planner.search.choices import Choices
from penstock.planner.search.layouts import describe_placement
from penstock.planner.search.space import Candidate
from penstock.sim.period import name_seconds
from penstock.units import format_bytes, format_share

__all__ = ["Finding", "Findings", "describe_refusal"]

_HEADINGS = (
    "bubble",
    "gap",
    "peak",
    "microbatches",
    "placement",
    "layers",
    "checkpointed",
    "order",
    "comparison",
)


@dataclass(frozen=True)
class Finding:
    """A plan with its choices, and where the seconds of its step go."""

    plan: Plan

    @property
    def choices(self) -> Choices:
        """The choices of the search."""
        assert self.plan.choices is not None, "a search has made the plan"
        return self.plan.choices

    @cached_property
    def seconds(self) -> float:
        """What a step over the whole batch costs, with the reduction between replicas."""
        return self.plan.seconds + self.choices.reduction_seconds

    @cached_property
    def causes(self) -> Breakdown:
        """Where the seconds go."""
        return break_down(self.plan)


@dataclass(frozen=True)
class Findings:
    """The plans that a search has found, the fastest first.

    `refused` are choices that do not fit, whatever the order; `num_slower` counts those that are
    proven to be slower than the best plan.
    """

    found: tuple[Finding, ...]
    refused: tuple[Candidate, ...]
    num_slower: int

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return self.found[0].plan

    @property
    def comparisons(self) -> tuple[str, ...]:
        """For every plan, why it is not the best, with the causes."""
        best = self.found[0]
        others = [why_slower(other.causes, best.causes) for other in self.found[1:]]
        return ("fastest", *others)

    @property
    def headings(self) -> tuple[str, ...]:
        """The headings of the table; the first names the seconds that a step costs."""
        return (f"{name_seconds(self.best.problem.boundary)} s", *_HEADINGS)

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The plans as a table of text."""
        pairs = zip(self.found, self.comparisons, strict=True)
        return tuple((*_cells(finding), comparison) for finding, comparison in pairs)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The candidates that are not in the table, and why."""
        remarks = []
        if self.num_slower:
            remarks.append(f"proven to be slower, and not solved: {self.num_slower}")
        if self.refused:
            remarks.append(f"over the limit, whatever the order: {len(self.refused)}, such as")
            tempting = sorted(self.refused, key=lambda one: float(one.problem.work.max()))
            remarks += [f"  {describe_refusal(one)}" for one in tempting[:3]]
        return tuple(remarks)

    def __repr__(self) -> str:
        return (
            f"<Findings: {len(self.found)} plans, the best takes {self.found[0].seconds:.4g} s; "
            f"slower: {self.num_slower}, over the limit: {len(self.refused)}>"
        )

    def __str__(self) -> str:
        table = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([*lines, *self.remarks])


def describe_refusal(candidate: Candidate) -> str:
    """Return choices that do not fit, with the missing bytes and the rank."""
    choices = candidate.choices
    return (
        f"{describe_placement(candidate.problem.placement)}, microbatches of "
        f"{choices.microbatch_size}, checkpointed {_join_runs(choices.checkpointed)}: over the "
        f"limit by {count_bytes(candidate.missing_bytes)} bytes on rank {candidate.fullest_rank}"
    )


def _cells(finding: Finding) -> tuple[str, ...]:
    plan, choices = finding.plan, finding.choices
    return (
        f"{finding.seconds:.4g}",
        format_share(plan.step.bubble_rate),
        format_share(plan.gap),
        format_bytes(plan.timeline.peak_bytes),
        _count_microbatches(plan, choices),
        describe_placement(plan.problem.placement),
        _count_runs(choices.sizes),
        _join_runs(choices.checkpointed),
        plan.schedule.name,
    )


def _count_microbatches(plan: Plan, choices: Choices) -> str:
    """Return the number and size of microbatches, and on how many replicas of how many ranks."""
    counted = f"{plan.problem.microbatches} x {choices.microbatch_size}"
    many = f" on {choices.replicas} replicas of {plan.problem.ranks}"
    return counted + (many if choices.replicas > 1 else "")


def _count_runs(sizes: Iterable[int]) -> str:
    """Return equal neighbours once, with their number.

    >>> _count_runs((3, 4, 4, 4, 2))
    '3 3x4 2'
    """
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return " ".join(f"{length}x{size}" if length > 1 else f"{size}" for size, length in runs)


def _join_runs(stages: Sequence[int]) -> str:
    """Return neighbouring stages as ranges.

    >>> _join_runs((0, 1, 2, 5)), _join_runs(())
    ('0-2 5', 'none')
    """
    ranges = []
    for _, run in groupby(enumerate(stages), key=lambda item: item[1] - item[0]):
        held = [stage for _, stage in run]
        ranges.append(f"{held[0]}-{held[-1]}" if len(held) > 1 else f"{held[0]}")
    return " ".join(ranges) or "none"
