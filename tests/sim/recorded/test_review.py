"""Predicted and recorded steps side by side."""

from dataclasses import replace

import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import ScheduleError
from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import FAMILIES
from penstock.sim.comparison import costs_for
from penstock.sim.engine import simulate
from penstock.sim.recorded.review import Pair, Tally, review
from penstock.sim.timeline import Timeline

GUESS = Costs(forward=[1, 2], backward_input=[1, 1], backward_weight=1)
TRUTH = Costs(forward=[1, 3], backward_input=[1, 2], backward_weight=[0.5, 1])


def test_every_kind_of_every_stage_has_its_own_cost() -> None:
    schedule = build("ZB-H1", ranks=2, microbatches=4)
    predicted, recorded = simulate(schedule, GUESS), simulate(lower(schedule), TRUTH)
    found = review(predicted, recorded)
    assert found.step == Pair(predicted.end_time, recorded.end_time)
    assert found.tallies == (
        Tally(0, 0, Kind.FORWARD, 4, Pair(4, 4)),
        Tally(0, 0, Kind.BACKWARD_INPUT, 4, Pair(4, 4)),
        Tally(0, 0, Kind.BACKWARD_WEIGHT, 4, Pair(4, 2)),
        Tally(1, 1, Kind.FORWARD, 4, Pair(8, 12)),
        Tally(1, 1, Kind.BACKWARD_INPUT, 4, Pair(4, 8)),
        Tally(1, 1, Kind.BACKWARD_WEIGHT, 4, Pair(4, 4)),
    )
    assert found.kinds == {
        Kind.FORWARD: Pair(12, 16),
        Kind.BACKWARD_INPUT: Pair(8, 12),
        Kind.BACKWARD_WEIGHT: Pair(8, 6),
    }
    assert found.ranks == found.stages == {0: Pair(12, 10), 1: Pair(16, 24)}
    idle = zip(predicted.idle_seconds, recorded.idle_seconds, strict=True)
    assert found.idle == tuple(Pair(*both) for both in idle)


def test_host_seconds_of_a_prediction_are_the_gaps_of_a_recording() -> None:
    for name in ("ZB-H1", "DualPipeV"):
        schedule = build(name, ranks=2, microbatches=4)
        predicted = simulate(schedule, Costs(host_action=0.25, host_message=0.125))
        assert predicted.program is not None
        # Actions are recorded from the moment when the host has launched them.
        launched = predicted.start + predicted.program.prices.host
        recorded = Timeline(schedule, launched, predicted.end, predicted.memory)
        found = review(predicted, recorded)
        assert all(tally.seconds.ratio == 1 for tally in found.tallies)
        assert [pair.ratio for pair in found.ranks.values()] == [1, 1]
        # Only the host seconds before the first action of all are in no recording.
        missing = predicted.end_time - recorded.end_time
        assert [pair.predicted - pair.recorded for pair in found.idle] == [missing, missing]


def test_a_review_reads_as_a_table() -> None:
    schedule = build("1F1B", ranks=2, microbatches=2)
    found = review(simulate(schedule, GUESS), simulate(schedule, TRUTH))
    assert str(found) == (
        "                 predicted s  recorded s  ratio\n"
        "step                      11        14.5   1.32\n"
        "rank 0 compute             6           5   0.83\n"
        "rank 0 idle                5         9.5   1.90\n"
        "rank 1 compute             8          12   1.50\n"
        "rank 1 idle                3         2.5   0.83\n"
        "all F                      6           8   1.33\n"
        "all B                      8           9   1.12\n"
        "stage 0 F, each            1           1   1.00\n"
        "stage 0 B, each            2         1.5   0.75\n"
        "stage 1 F, each            2           3   1.50\n"
        "stage 1 B, each            2           3   1.50\n"
        "\n"
        "the step took 14.5 s, 3.5 s (31.8 %) longer than predicted:\n"
        "  +2.36 s  compute: all actions together took longer\n"
        "  +1.14 s  imbalance: stages and kinds took other shares of the work"
    )


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "ForwardOnly"])
def test_what_was_predicted_exactly_has_ratio_one_everywhere(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    costs = costs_for(schedule, Costs(forward=2, transfer=0.5))
    found = review(simulate(schedule, costs), simulate(lower(schedule), costs))
    pairs = [*(tally.seconds for tally in found.tallies), *found.kinds.values()]
    assert {round(pair.ratio, 12) for pair in pairs} == {1.0}
    assert {round(pair.error, 12) for pair in pairs} == {0.0}
    actions = sum(tally.actions for tally in found.tallies)
    assert actions == len(schedule.rows)


def test_members_of_an_overlap_share_its_time() -> None:
    schedule = build("DualPipe", ranks=4, microbatches=16)
    assert schedule.rows.joined.any()
    costs = costs_for(schedule, Costs(overlap_gain=0.5))
    timeline = simulate(schedule, costs)
    found = review(timeline, timeline)
    busy = [found.ranks[rank].predicted for rank in range(4)]
    assert busy == pytest.approx(timeline.busy_seconds)


@pytest.mark.parametrize(
    ("predicted", "recorded", "message"),
    [
        (
            build("1F1B", ranks=2, microbatches=4),
            build("GPipe", ranks=2, microbatches=4),
            "rank 0, compute 2: 0B0 is predicted, but 0F2 was recorded; "
            "compare a plan with a step that ran in its order",
        ),
        (
            build("1F1B", ranks=2, microbatches=4),
            build("1F1B", ranks=3, microbatches=4),
            "both steps must have as many ranks (predicted: 2, recorded: 3)",
        ),
        (
            build("ForwardOnly", ranks=2, microbatches=4),
            build("ForwardOnly", ranks=2, microbatches=3),
            "rank 0 must run as many compute actions as predicted (predicted: 4, recorded: 3); "
            "compare steps of as many microbatches",
        ),
    ],
)
def test_steps_of_another_order_are_refused(
    predicted: Schedule, recorded: Schedule, message: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        review(simulate(predicted), simulate(recorded))
    assert str(caught.value) == message


def test_what_was_not_predicted_at_all_took_infinitely_longer() -> None:
    schedule = build("1F1B", ranks=2, microbatches=2)
    found = review(
        simulate(schedule, replace(GUESS, forward=0)), simulate(schedule, replace(TRUTH))
    )
    assert found.kinds[Kind.FORWARD].ratio == float("inf")


def test_nothing_is_as_long_as_nothing() -> None:
    assert (Pair(0.0, 0.0).ratio, Pair(0.0, 0.0).error) == (1.0, 0.0)
    assert (Pair(1.0, 0.0).ratio, Pair(1.0, 0.0).error) == (0.0, float("inf"))


def test_a_rank_that_is_never_idle_is_idle_for_zero_seconds() -> None:
    # A sum of many thirds is not a multiple of a third, to the last digit.
    schedule = build("GPipe", ranks=1, microbatches=50)
    timeline = simulate(schedule, Costs(forward=1 / 3, full_backward=0.1))
    assert review(timeline, timeline).idle == (Pair(0.0, 0.0),)
