"""Compute that ran beside messages, in timelines made for it."""

from dataclasses import replace

import pytest

from penstock.assembly import build, lower
from penstock.errors import ScheduleError
from penstock.ir.actions import Kind
from penstock.sim.engine import simulate
from penstock.sim.recorded.slowdowns import Slowdown, find_slowdowns
from tests.sim.messages import timeline_of

NONE = [(0.0, 0.0)] * 5


def test_forwards_beside_a_pending_receive_are_named_with_both_medians() -> None:
    seconds = [25.0, 26.0, 24.0, 36.0, 37.0, 35.0]
    found = find_slowdowns(timeline_of(seconds, [*NONE, (75.0, 183.0)], sent=200.0))
    assert found == (Slowdown(1, 1, Kind.FORWARD, "receives", 36.0, 25.0),)
    assert found[0].ratio == pytest.approx(1.44)


def test_forwards_beside_sends_that_have_not_arrived_are_named() -> None:
    # The sends begin when the third forward of rank 0 ends, and arrive after the last one.
    timeline = timeline_of([0.01] * 6, [(5.9, 6.0)] * 6, sent=3.0)
    start, end = timeline.start.copy(), timeline.end.copy()
    start[:6] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    end[:6] = [0.5, 1.5, 2.5, 4.0, 5.0, 5.9]
    found = find_slowdowns(replace(timeline, start=start, end=end))
    assert found == (Slowdown(0, 0, Kind.FORWARD, "sends", 1.0, 0.5),)


@pytest.mark.parametrize(
    ("seconds", "pending"),
    [
        # Hardly slower; slower, but not reliably; never alone; never beside a message.
        ([1.0, 1.0, 1.0, 1.05, 1.05, 1.05], (3.0, 7.0)),
        ([1.0, 1.0, 3.0, 1.0, 2.0, 2.0], (5.0, 11.0)),
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], (0.0, 9.0)),
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], (0.0, 0.0)),
    ],
)
def test_differences_that_prove_nothing_are_left_out(
    seconds: list[float], pending: tuple[float, float]
) -> None:
    assert find_slowdowns(timeline_of(seconds, [*NONE, pending], sent=20.0)) == ()


def test_several_steps_count_together() -> None:
    seconds = [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
    step = timeline_of(seconds, [*NONE, (2.0, 6.0)], sent=20.0)
    assert find_slowdowns(step) == ()
    assert find_slowdowns(step, step) == (Slowdown(1, 1, Kind.FORWARD, "receives", 2.0, 1.0),)
    with pytest.raises(ScheduleError, match="one schedule"):
        find_slowdowns(step, simulate(build("GPipe", ranks=2, microbatches=2)))


@pytest.mark.parametrize("family", ["1F1B", "ZBV", "DualPipeV"])
def test_simulated_compute_is_never_slowed_down(family: str) -> None:
    schedule = build(family, ranks=4, microbatches=8)
    assert find_slowdowns(simulate(schedule)) == ()
    assert find_slowdowns(simulate(lower(schedule))) == ()
