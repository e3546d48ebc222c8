"""Schedules with one thing changed: refused, or run to their end by a second opinion."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.assembly import lower
from penstock.checks.deadlock import Channels
from penstock.checks.report import find_problems
from penstock.ir.actions import Action, Kind, Overlap, Work
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from tests.checks.reference import find_fault
from tests.strategies import (
    dag_schedules,
    every_family,
    examples,
    schedules,
    with_memory_actions,
)

SCHEDULES = schedules(max_ranks=4, max_microbatches=5, max_stages_per_rank=2) | dag_schedules(
    max_ranks=4, max_microbatches=3
)
CHANNELS: tuple[Channels, ...] = ("directed", "shared")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A schedule with one change, and what the change was."""

    schedule: Schedule
    change: str


def with_orders(schedule: Schedule, orders: list[list[Work]]) -> Schedule:
    """Other orders for the same placement, dataflow and microbatches, right or wrong."""
    return replace(schedule, rows=Rows.from_works(orders))


@st.composite
def mutants(draw: st.DrawFn) -> Mutant:
    """Draw a schedule, lowered or not, with one thing changed."""
    schedule = draw(SCHEDULES)
    if not schedule.is_forward_only and draw(st.booleans()):
        schedule = draw(with_memory_actions(schedule))
    if draw(st.booleans()):
        schedule = lower(schedule, receives=draw(st.sampled_from(("early", "late"))))
    orders = [list(order) for order in schedule.orders]
    rank = draw(st.integers(0, len(orders) - 1))
    order = orders[rank]
    here = draw(st.integers(0, len(order) - 1))
    there = draw(st.integers(0, len(order) - 1))
    change = draw(
        st.sampled_from(("drop", "double", "swap", "swap next", "move", "alter", "send off"))
    )
    match change:
        case "drop":
            del order[here]
        case "double":
            order.insert(there, order[here])
        case "swap":
            order[here], order[there] = order[there], order[here]
        case "swap next":
            after = (here + 1) % len(order)
            order[here], order[after] = order[after], order[here]
        case "move":
            order.insert(there, order.pop(here))
        case "send off":
            other = orders[draw(st.integers(0, len(orders) - 1))]
            other.insert(draw(st.integers(0, len(other))), order.pop(here))
        case _:
            order[here] = draw(altered(order[here]))
    return Mutant(with_orders(schedule, orders), f"{change} on rank {rank}, {here} and {there}")


@st.composite
def altered(draw: st.DrawFn, work: Work) -> Work:
    """Draw the same work with another stage, microbatch or kind."""
    if isinstance(work, Overlap):
        first, *rest = work.actions
        if draw(st.booleans()):
            return Overlap((draw(altered_action(first)), *rest))
        return draw(st.sampled_from(work.actions))
    return draw(altered_action(work))


@st.composite
def altered_action(draw: st.DrawFn, action: Action) -> Action:
    step = draw(st.sampled_from((-1, 1)))
    match draw(st.sampled_from(("stage", "microbatch", "kind"))):
        case "microbatch" if action.microbatch is not None:
            return replace(action, microbatch=max(0, action.microbatch + step))
        case "kind" if action.kind.is_compute:
            return replace(action, kind=draw(st.sampled_from([k for k in Kind if k.is_compute])))
        case "kind" if action.kind.is_memory:
            return replace(action, kind=draw(st.sampled_from([k for k in Kind if k.is_memory])))
        case _:
            return replace(action, stage=max(0, action.stage + step))


def assert_opinions_agree(mutant: Mutant) -> None:
    for channels in CHANNELS:
        problems = find_problems(mutant.schedule, channels=channels)
        fault = find_fault(mutant.schedule, channels)
        told = (mutant.change, channels, fault, "\n".join(map(str, problems)))
        assert bool(problems) == (fault is not None), told


@given(mutants())
@settings(max_examples=examples(300))
def test_changed_schedule_is_refused_exactly_when_it_does_not_run(mutant: Mutant) -> None:
    assert_opinions_agree(mutant)


@pytest.mark.slow
@given(mutants())
@settings(max_examples=10_000)
def test_many_changed_schedules_are_refused_exactly_when_they_do_not_run(mutant: Mutant) -> None:
    assert_opinions_agree(mutant)


@pytest.mark.parametrize("channels", CHANNELS)
def test_second_opinion_lets_every_family_run(channels: Channels) -> None:
    for schedule in every_family(4, 6):
        assert find_fault(schedule, channels) is None
        assert find_fault(lower(schedule), channels) is None
        assert find_fault(lower(schedule, receives="late"), channels) is None


def test_changes_of_both_sorts_are_drawn() -> None:
    verdicts: Counter[bool] = Counter()

    @given(mutants())
    @settings(max_examples=100)
    def draw(mutant: Mutant) -> None:
        verdicts[bool(find_problems(mutant.schedule))] += 1

    draw()
    assert verdicts[True] > 10
    assert verdicts[False] > 10
