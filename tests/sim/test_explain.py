"""Why a step takes as long as it does."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate
from penstock.sim.explain import Explanation, Saving, explain
from tests import strategies
from tests.tables import read_schedule

TWO_RANKS = read_schedule("""
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
""")


def path_of(found: Explanation) -> str:
    return " ".join(str(span.action) for span in found.critical_path)


def gaps_of(found: Explanation) -> list[str]:
    return [
        f"rank {gap.rank} idle {gap.start:g}-{gap.end:g}: {gap.action} for {gap.waited_for} "
        f"on rank {gap.waited_for_rank}, transfer {gap.transfer_seconds:g}"
        for gap in found.gaps
    ]


def test_critical_path_and_gaps_of_a_small_pipeline() -> None:
    found = explain(TWO_RANKS, Costs(transfer=0.5))
    assert path_of(found) == "0F0 1F0 1B0 1F1 1B1 0B1"
    assert gaps_of(found) == [
        "rank 0 idle 2-5: 0B0 for 1B0 on rank 1, transfer 0.5",
        "rank 0 idle 7-8: 0B1 for 1B1 on rank 1, transfer 0.5",
    ]
    assert found.critical_seconds == {"F": 3, "B": 6, "transfer": 1}
    assert found.idle_seconds == {"B": 3, "transfer": 1}
    assert [gap.seconds for gap in found.gaps] == [3, 1]


def test_lowered_schedule_has_the_same_reasons() -> None:
    # The wait of a rank for its very first message was once counted as a gap.
    costs = Costs(transfer=0.5)
    found = explain(lower(TWO_RANKS, receives=costs), costs)
    assert path_of(found) == "0F0 1F0 1B0 1F1 1B1 0B1"
    assert gaps_of(found) == [
        "rank 0 idle 2-5: 0B0 for 1SEND_B0 on rank 1, transfer 0.5",
        "rank 0 idle 7-8: 0B1 for 1SEND_B1 on rank 1, transfer 0.5",
    ]


def test_wait_inside_an_overlap_is_listed_once() -> None:
    schedule = read_schedule("""
        0F0 (0F1;0B0)OVERLAP_F_B 0B1
        1F0 1B0 1F1 1B1
    """)
    assert gaps_of(explain(schedule)) == [
        "rank 0 idle 1-4: 0F1 for 1B0 on rank 1, transfer 0",
        "rank 0 idle 7-10: 0B1 for 1B1 on rank 1, transfer 0",
        "rank 1 idle 4-7: 1F1 for 0F1 on rank 0, transfer 0",
    ]


def test_savings_come_largest_first() -> None:
    # Path: 3 F, 3 I, 3 W (each B is I and W), 2 transfers.
    found = explain(TWO_RANKS, Costs(forward=2, backward_input=4, transfer=0.5))
    end = 3 * 2 + 3 * 5 + 2 * 0.5
    assert found.timeline.end_time == end
    assert [(saving.cost, round(saving.seconds, 9)) for saving in found.savings] == [
        ("backward_input", 0.6),
        ("forward", 0.3),
        ("backward_weight", 0.15),
        ("transfer", 0.05),
    ]
    assert found.savings[0].share == pytest.approx(0.6 / end)


def test_full_backward_is_asked_about_where_it_is_given() -> None:
    found = explain(TWO_RANKS, Costs(full_backward=4))
    assert {saving.cost: round(saving.seconds, 9) for saving in found.savings} == {
        "full_backward": 0.6,
        "forward": 0.15,
        "backward_input": 0,
        "backward_weight": 0,
        "transfer": 0,
    }


def test_step_that_costs_nothing_saves_nothing() -> None:
    found = explain(TWO_RANKS, Costs(forward=0, backward_input=0, backward_weight=0))
    assert set(found.savings) == {
        Saving(cost, 0, 0) for cost in ("forward", "backward_input", "backward_weight", "transfer")
    }
    assert found.gaps == ()


@st.composite
def priced(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    schedule = draw(
        strategies.schedules(max_ranks=5, max_microbatches=6)
        | strategies.dag_schedules(max_ranks=4, max_microbatches=4)
    )
    costs = draw(strategies.costs(schedule))
    is_lowered = draw(st.booleans())
    return lower(schedule) if is_lowered else schedule, costs


@given(priced())
def test_critical_path_leads_without_idle_time_to_the_end_of_the_step(
    example: tuple[Schedule, Costs],
) -> None:
    schedule, costs = example
    found = explain(schedule, costs)
    timeline, path = found.timeline, found.critical_path
    assert path[-1].end == timeline.end_time
    assert path[0].start == 0
    transfers = costs.per_link(schedule.num_ranks)
    for before, after in pairwise(path):
        seconds = after.start - before.end
        if before.rank != after.rank:
            assert seconds == transfers[before.rank, after.rank]
        elif schedule.has_communication:
            # A message may have had to wait for the receive that follows this work.
            assert seconds in (0, *transfers[:, after.rank])
        else:
            assert seconds == 0


@given(priced())
def test_gaps_are_all_the_idle_time_between_first_and_last_action(
    example: tuple[Schedule, Costs],
) -> None:
    found = explain(*example)
    timeline = found.timeline
    for rank, span in enumerate(timeline.rank_spans):
        idle = sum(gap.seconds for gap in found.gaps if gap.rank == rank)
        assert idle == span - timeline.busy_seconds[rank]
    assert all(0 <= gap.transfer_seconds <= gap.seconds for gap in found.gaps)


@given(priced())
def test_savings_are_what_a_simulation_with_cheaper_costs_gives(
    example: tuple[Schedule, Costs],
) -> None:
    schedule, costs = example
    base = simulate(schedule, costs).end_time
    for saving in explain(schedule, costs).savings:
        value = getattr(costs, saving.cost)
        if saving.cost == "transfer":
            cheaper: object = [[cost * 0.95 for cost in row] for row in value]
        else:
            cheaper = [cost * 0.95 for cost in value]
        changed = Costs.from_mapping(
            {name: getattr(costs, name) for name in costs.__slots__} | {saving.cost: cheaper}
        )
        assert saving.seconds == pytest.approx(base - simulate(schedule, changed).end_time)
        assert saving.share == pytest.approx(saving.seconds / base)


def test_explanation_knows_its_timeline() -> None:
    costs = Costs(forward=[1, 2], transfer=0.25)
    found = explain(TWO_RANKS, costs)
    assert found.timeline.end_time == simulate(TWO_RANKS, costs).end_time
    assert replace(found, gaps=()).idle_seconds == {}


def test_longer_schedules_are_explained_too() -> None:
    schedule = build("DualPipeV", ranks=4, microbatches=10)
    found = explain(lower(schedule), Costs(overlap_gain=0.5, send=0.25, transfer=0.5))
    assert found.critical_path[-1].end == found.timeline.end_time


def test_repr_of_an_explanation_is_one_line() -> None:
    found = explain(build("GPipe", ranks=2, microbatches=2))
    assert repr(found) == (
        "<Explanation of GPipe: end time 9 s, actions on the critical path: 6, idle gaps: 1>"
    )
