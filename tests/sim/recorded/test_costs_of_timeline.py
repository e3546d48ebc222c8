"""Costs that are read off a timeline price its schedule as it ran."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import CostsError
from penstock.sim.engine import simulate
from penstock.sim.recorded.costs_of_timeline import costs_of, middle_mean
from penstock.sim.timeline import Timeline

COSTS = Costs(
    forward=[1, 2, 3, 4], backward_input=[2, 1, 2, 1], backward_weight=[1, 1, 2, 2], send=0.25
)
LINKS = [[0.0, 0.1, 0.5, 0.5], [0.2, 0.0, 0.3, 0.5], [0.5, 0.4, 0.0, 0.6], [0.5, 0.5, 0.7, 0.0]]


def slowed(timeline: Timeline, factor: float) -> Timeline:
    """Return the same step with everything slower by this factor."""
    return Timeline(
        timeline.schedule, factor * timeline.start, factor * timeline.end, timeline.memory
    )


@pytest.mark.parametrize("family", ["GPipe", "1F1B", "ZB-H1", "ZB-H2"])
@pytest.mark.parametrize("transfer", [0.0, 0.125, LINKS], ids=["none", "alike", "per link"])
def test_what_was_simulated_comes_back(family: str, transfer: float | list[list[float]]) -> None:
    costs = replace(COSTS, transfer=transfer)
    timeline = simulate(lower(build(family, ranks=4, microbatches=6)), costs)
    again = simulate(timeline.schedule, costs_of(timeline))
    assert again.start == pytest.approx(timeline.start)
    assert again.end == pytest.approx(timeline.end)


def test_seconds_are_those_of_size_one_without_the_host() -> None:
    given = replace(COSTS, transfer=0.125, host_action=0.5, microbatch_scale=[1, 2, 0.5, 4])
    timeline = simulate(lower(build("ZB-H1", ranks=4, microbatches=4)), given)
    found = costs_of(timeline, like=given)
    assert found.forward == pytest.approx(given.forward)
    assert found.send == pytest.approx(given.send)
    again = simulate(timeline.schedule, found)
    assert again.end == pytest.approx(timeline.end)


def test_each_link_has_its_transfer_and_links_without_messages_get_the_mean() -> None:
    timeline = simulate(
        lower(build("1F1B", ranks=3, microbatches=6)),
        Costs(transfer=[[0, 0.125, 9], [0.25, 0, 0.375], [9, 0.5, 0]]),
    )
    assert costs_of(timeline).transfer == (
        (0.0, 0.125, 0.3125),
        (0.25, 0.0, 0.375),
        (0.3125, 0.5, 0.0),
    )
    like = Costs(transfer=7)
    assert costs_of(timeline, like=like).transfer == (
        (0.0, 0.125, 7.0),
        (0.25, 0.0, 0.375),
        (7.0, 0.5, 0.0),
    )


def test_parts_of_a_backward_that_was_never_split_are_equal() -> None:
    costs = costs_of(simulate(build("1F1B", ranks=4, microbatches=6), replace(COSTS, send=0.0)))
    assert costs.forward == (1, 2, 3, 4)
    assert costs.full_backward == (3, 2, 4, 3)
    assert costs.backward_input == costs.backward_weight == (1.5, 1, 2, 1.5)
    assert costs.send == 0


def test_a_backward_that_was_always_split_is_the_sum_of_its_parts() -> None:
    costs = costs_of(simulate(build("ZB-H2", ranks=4, microbatches=6), replace(COSTS, send=0.0)))
    assert costs.full_backward == (3, 2, 4, 3)


@pytest.mark.parametrize("family", ["1F1B", "ZB-H2"])
def test_what_never_ran_is_as_much_slower_as_what_did(family: str) -> None:
    like = replace(
        COSTS,
        full_backward=[2, 2, 3, 3],
        send=0.0,
        overlap_gain=0.5,
        activation_bytes=[1, 2, 3, 4],
    )
    timeline = simulate(build(family, ranks=4, microbatches=6), like)
    expected = Costs(
        forward=[3, 6, 9, 12],
        backward_input=[6, 3, 6, 3],
        backward_weight=[3, 3, 6, 6],
        full_backward=[6, 6, 9, 9],
        transfer=[[0.0] * 4] * 4,
        overlap_gain=0.5,
        activation_bytes=[1, 2, 3, 4],
    )
    assert costs_of(slowed(timeline, 3), like=like) == expected


def test_several_steps_count_together_without_their_extremes() -> None:
    timeline = simulate(build("1F1B", ranks=2, microbatches=2), Costs(forward=[2, 3]))
    costs = costs_of(*(slowed(timeline, factor) for factor in (1, 2, 3, 90)))
    assert costs.forward == (5.0, 7.5)


# The fastest message of all steps was taken, so that more steps made links look ever faster.
def test_a_transfer_is_that_of_a_typical_step() -> None:
    schedule = lower(build("1F1B", ranks=2, microbatches=4))
    steps = [simulate(schedule, Costs(transfer=seconds)) for seconds in (0.0, 0.25, 0.5, 9.0)]
    assert costs_of(*steps).transfer == ((0.0, 0.375), (0.375, 0.0))


def test_steps_of_different_schedules_are_refused() -> None:
    steps = [simulate(build(name, ranks=2, microbatches=2)) for name in ("1F1B", "GPipe")]
    with pytest.raises(CostsError) as caught:
        costs_of(*steps)
    assert str(caught.value) == (
        "the timelines must be of one schedule (got several); take the costs of each by itself"
    )


def test_the_middle_mean_leaves_out_a_quarter_at_each_end() -> None:
    expected = {1: 0.0, 2: 0.5, 3: 1.0, 4: 1.5, 8: 3.5}
    for count, mean in expected.items():
        values = np.arange(float(count))
        assert middle_mean(values) == middle_mean(values[::-1]) == mean
    assert middle_mean(np.array([1.0, 1.0, 3.0, 1000.0])) == 2.0


def test_collectives_come_back_as_they_occupied_their_ranks() -> None:
    given = replace(
        COSTS,
        transfer=0.125,
        unshard=[1, 2, 1, 3],
        reshard=0.25,
        reduce_grad=[2, 1, 1, 4],
        collective_overlap=0,
    )
    timeline = simulate(lower(build("1F1B", ranks=4, microbatches=6)), given)
    recorded = Timeline(timeline.schedule, timeline.start, timeline.end, timeline.memory)
    found = costs_of(recorded)
    assert found.unshard == pytest.approx((1, 2, 1, 3))
    assert found.reshard == pytest.approx((0.25,) * 4)
    assert found.reduce_grad == pytest.approx((2, 1, 1, 4))
    assert found.collective_overlap == 0
    assert simulate(timeline.schedule, found).end_time == pytest.approx(timeline.end_time)
    # What never ran comes from the costs before.
    plain = simulate(build("1F1B", ranks=4, microbatches=6), COSTS)
    assert costs_of(plain, like=given).unshard == given.unshard


def test_pairs_say_what_their_kinds_save_and_not_what_actions_take() -> None:
    given = Costs([1, 2, 1, 1.5], [1, 1, 2, 2], overlap_gain={"F+B": 0.5, "F+W": 0.25})
    timeline = simulate(build("DualPipeV", ranks=2, microbatches=8), given)
    found = costs_of(timeline, like=given)
    assert found.forward == pytest.approx((1, 2, 1, 1.5))
    assert found.backward_input == pytest.approx((1, 1, 2, 2))
    # No forward ran together with a W, so that what is known about these stays.
    assert gains_of(found) == pytest.approx({"F+B": 0.5, "F+W": 0.25})
    assert gains_of(costs_of(timeline)) == pytest.approx({"F+B": 0.5})


def gains_of(costs: Costs) -> dict[str, float]:
    assert isinstance(costs.overlap_gain, tuple)
    return dict(costs.overlap_gain)
