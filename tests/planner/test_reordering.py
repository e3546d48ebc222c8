"""Microbatches of different length, arranged for a schedule."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ArgumentError, SizeError
from penstock.planner.reordering import Reordering
from tests.strategies import FAMILY_NAMES, costs, schedules

COSTS = ps.Costs(transfer=0.05)


def seconds(schedule: ps.Schedule, prices: ps.Costs, sizes: list[float]) -> float:
    return ps.simulate(schedule, replace(prices, microbatch_scale=sizes)).end_time


def draw_sizes(number: int, microbatches: int = 32) -> list[float]:
    """Lengths with a mean of 1 and a coefficient of variation of one half."""
    sizes: list[float] = np.random.default_rng(number).gamma(4.0, 0.25, microbatches).tolist()
    return sizes


@pytest.mark.parametrize(
    ("family", "least_gain"), [("1F1B", 0.25), ("ZB-H1", 0.15), ("ZBV", 0.05)]
)
def test_uneven_microbatches_take_less_time_than_as_they_come(
    family: str, least_gain: float
) -> None:
    schedule = ps.build(family, ranks=8, microbatches=32)
    reordering = Reordering(schedule, COSTS)
    gains = []
    for number in range(6):
        sizes = draw_sizes(number)
        arranged = reordering.for_sizes(sizes)
        ps.check(arranged)
        gains.append(1 - seconds(arranged, COSTS, sizes) / seconds(schedule, COSTS, sizes))
    assert np.mean(gains) >= least_gain


@given(st.data())
def test_no_schedule_gets_slower_and_each_microbatch_keeps_its_actions(
    data: st.DataObject,
) -> None:
    schedule = data.draw(schedules(max_ranks=4, max_microbatches=6))
    prices = data.draw(costs(schedule))
    count = schedule.microbatches
    eighths = data.draw(st.lists(st.integers(0, 24), min_size=count, max_size=count))
    sizes = [number / 8 for number in eighths]
    arranged = Reordering(schedule, prices).for_sizes(sizes)
    ps.check(arranged)
    before, after = (seconds(order, prices, sizes) for order in (schedule, arranged))
    assert after <= before * (1 + 1e-12)


def test_the_seconds_that_are_compared_are_those_of_the_simulator() -> None:
    prices = ps.Costs(host_action=0.01, host_message=0.02, send=0.1, transfer=0.3)
    sizes = draw_sizes(0, 6)
    for family in FAMILY_NAMES:
        if family == "DualPipe":
            continue
        schedule = ps.build(family, ranks=3, microbatches=6)
        found = Reordering(schedule, prices)._seconds(np.array(sizes))
        assert found == pytest.approx(seconds(schedule, prices, sizes), rel=1e-12)


def test_sizes_must_be_numbers_and_one_for_each_microbatch() -> None:
    reordering = Reordering(ps.build("1F1B", ranks=2, microbatches=3), COSTS)
    with pytest.raises(SizeError, match="one for each of the 3 microbatches"):
        reordering.for_sizes([1, 2])
    with pytest.raises(ArgumentError, match="sizes must be one number for each microbatch"):
        reordering.for_sizes(None)  # type: ignore[arg-type]  # refused
    with pytest.raises(ArgumentError, match="a size must be a number from 0"):
        reordering.for_sizes([1, 2, -1])


def test_a_single_microbatch_stays_where_it_is() -> None:
    schedule = ps.build("1F1B", ranks=2, microbatches=1)
    assert Reordering(schedule, COSTS).for_sizes([3.0]) == schedule
