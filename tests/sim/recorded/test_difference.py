"""Why a recorded step differs from its prediction."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.ir.clock import run_in_order
from penstock.ir.graph import build_graph
from penstock.ir.schedule import Schedule
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.schedules.registry import FAMILIES
from penstock.sim.engine import simulate
from penstock.sim.recorded.difference import Difference, find_difference, has_same_compute
from penstock.sim.timeline import Timeline

CAUSES = ("compute", "imbalance", "waiting", "sharding", "link", "host")
TRAINING = [name for name in FAMILIES if name != "ForwardOnly"]


def causes(predicted: Timeline, recorded: Timeline) -> dict[str, float]:
    """Return the causes that matter, rounded; together they must be the difference."""
    found = find_difference(predicted, recorded)
    assert set(found.by_cause) == set(CAUSES)
    assert sum(found.by_cause.values()) == pytest.approx(recorded.end_time - predicted.end_time)
    return {
        cause: round(seconds, 9)
        for cause, seconds in found.by_cause.items()
        if abs(seconds) > 1e-9
    }


def pause(timeline: Timeline, at: float, seconds: float) -> Timeline:
    """Return a recorded step in which every rank pauses: nothing starts for some seconds."""
    later = timeline.start >= at
    return replace(
        timeline,
        start=np.where(later, timeline.start + seconds, timeline.start),
        end=np.where(later, timeline.end + seconds, timeline.end),
        program=None,
    )


@pytest.mark.parametrize("name", TRAINING)
def test_a_step_that_went_as_predicted_has_no_causes(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    costs = Costs(forward=2, transfer=0.25)
    predicted = simulate(lower(schedule), costs)
    recorded = replace(predicted, program=None)
    assert causes(predicted, recorded) == {}
    # A prediction without messages knows nothing of when receives are posted.
    assert set(causes(simulate(schedule, costs), recorded)) <= {"link"}


def test_compute_that_is_slower_everywhere_is_named_compute() -> None:
    schedule = build("ZB-H1", ranks=3, microbatches=6)
    slower = Costs(forward=1.5, backward_input=1.5, backward_weight=1.5)
    predicted, recorded = simulate(schedule), simulate(lower(schedule), slower)
    assert causes(predicted, recorded) == {"compute": 0.5 * predicted.end_time}


def test_work_that_is_only_spread_otherwise_is_named_imbalance() -> None:
    schedule = build("1F1B", ranks=2, microbatches=4)
    predicted = simulate(schedule, Costs(forward=[1, 1], full_backward=[2, 2]))
    recorded = simulate(schedule, Costs(forward=[0.5, 1.5], full_backward=[1, 3]))
    assert causes(predicted, recorded) == {"imbalance": recorded.end_time - predicted.end_time}


def test_messages_that_take_longer_are_named_link() -> None:
    schedule = build("1F1B", ranks=4, microbatches=8)
    predicted = simulate(schedule, Costs(transfer=0.1))
    recorded = simulate(lower(schedule), Costs(transfer=0.5))
    assert causes(predicted, recorded) == {
        "link": round(recorded.end_time - predicted.end_time, 9)
    }


def test_actions_that_vary_around_their_mean_make_ranks_wait() -> None:
    schedule = build("GPipe", ranks=2, microbatches=4)
    predicted = simulate(schedule)
    rows = schedule.rows
    # Forwards of the first stage take 0.5 and 1.5 in turn, those of the second the reverse.
    turn = np.where((rows.microbatch + rows.stage) % 2 == 0, -0.5, 0.5)
    duration = np.where(rows.is_kind(Kind.FORWARD), 1.0 + turn, 2.0)
    run = run_in_order(
        rows, build_graph(schedule), duration=duration, busy=duration, lag=np.zeros(len(rows) * 2)
    )
    recorded = replace(predicted, start=run.start, end=run.start + duration, program=None)
    assert causes(predicted, recorded) == {"waiting": recorded.end_time - predicted.end_time}


def test_pauses_and_sends_are_named_host() -> None:
    schedule = lower(build("1F1B", ranks=2, microbatches=4))
    predicted = simulate(schedule)
    assert causes(predicted, pause(predicted, at=6.0, seconds=2.0)) == {"host": 2.0}
    sending = simulate(schedule, Costs(send=0.25))
    assert set(causes(predicted, sending)) <= {"host", "link"}


def test_predicted_time_between_actions_counts_against_what_was_recorded() -> None:
    # What follows an action in the prediction, such as sends, is replaced with the host's time.
    schedule = build("1F1B", ranks=2, microbatches=4)
    predicted = simulate(schedule, Costs(send=0.25))
    without = simulate(lower(schedule), Costs())
    found = causes(predicted, without)
    assert found["host"] < 0
    assert set(found) <= {"host", "link"}


def test_reducing_gradients_is_named_sharding() -> None:
    schedule = add_reduce_grad(build("1F1B", ranks=2, microbatches=2))
    predicted = simulate(build("1F1B", ranks=2, microbatches=2))
    reduction = int(np.flatnonzero(schedule.rows.is_kind(Kind.REDUCE_GRAD))[0])
    recorded = simulate(schedule)
    recorded.end[reduction] += 1.0
    assert recorded.schedule.rows.rank(reduction) == 0  # the rank that ends last
    assert causes(predicted, recorded) == {"sharding": 1.0}


def test_the_difference_reads_as_sentences() -> None:
    found = Difference(10.0, 12.0, 1.5, 0.0, -0.25, 0.0, 0.5, 0.25)
    assert str(found) == (
        "the step took 12 s, 2 s (20.0 %) longer than predicted:\n"
        "  +1.5 s  compute: all actions together took longer\n"
        "  +0.5 s  link: messages took longer from rank to rank\n"
        "  -0.25 s  waiting: single actions vary, and ranks wait for the slow ones\n"
        "  +0.25 s  host: ranks started messages, or paused with all that they needed"
    )
    assert str(Difference(10.0, 10.0, *[0.0] * 6)) == "the step took 10 s, as predicted"


def test_only_steps_with_the_same_compute_in_order_can_be_compared() -> None:
    one, other = (build(name, ranks=2, microbatches=4) for name in ("1F1B", "GPipe"))
    assert has_same_compute(one, lower(one))
    assert not has_same_compute(one, other)
    assert not has_same_compute(one, build("1F1B", ranks=2, microbatches=5))
    assert not has_same_compute(one, build("1F1B", ranks=3, microbatches=4))


@given(
    name=st.sampled_from(TRAINING),
    seed=st.integers(0, 1000),
    is_lowered=st.booleans(),
)
def test_causes_always_add_up(name: str, seed: int, *, is_lowered: bool) -> None:
    random = np.random.default_rng(seed)
    schedule = build(name, ranks=4, microbatches=8)
    run: Schedule = lower(schedule) if is_lowered else schedule
    guess, truth = (
        Costs(
            forward=random.uniform(0.5, 2, schedule.num_stages).tolist(),
            transfer=random.uniform(0, 1),
            send=random.uniform(0, 0.2),
        )
        for _ in range(2)
    )
    recorded = replace(simulate(run, truth), program=None)
    causes(simulate(schedule, guess), recorded)
