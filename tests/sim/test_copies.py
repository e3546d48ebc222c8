"""Recomputation on a rank, and copies between a rank and its host beside compute."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError
from penstock.passes import add_offload, add_recompute
from penstock.sim.waits import find_waits
from tests.strategies import costs, schedules, with_memory_actions
from tests.tables import read_schedule

ORDER = "0F0 0F1 0F2 0B0 0B1 0B2"
BYTES = ps.Costs(activation_bytes=10, message_bytes=2)


def table(timeline: ps.Timeline) -> list[str]:
    return [f"{s.action} {s.start:g}-{s.end:g} holds {s.bytes:g}" for s in timeline.spans(0)]


def test_recompute_takes_the_seconds_of_a_forward_and_the_bytes_that_it_left_out() -> None:
    timeline = ps.simulate(add_recompute(read_schedule(ORDER), [(0, 0)]), BYTES)
    assert table(timeline) == [
        "0F0 0-1 holds 2",
        "0F1 1-2 holds 12",
        "0F2 2-3 holds 22",
        "0RECOMPUTE0 3-4 holds 30",
        "0B0 4-6 holds 20",
        "0B1 6-8 holds 10",
        "0B2 8-10 holds 0",
    ]
    assert timeline.rank_peak_activations == (3,)
    given = replace(BYTES, recompute=0.5, input_bytes=4, host_action=0.25)
    assert ps.simulate(timeline.schedule, given).end_time == 9 + 0.5 + 7 * 0.25


def test_copies_run_beside_compute_and_in_both_directions_at_once() -> None:
    schedule = read_schedule("0F0 0F1 0OFFLOAD0 0F2 0OFFLOAD1 0RELOAD0 0B2 0RELOAD1 0B0 0B1")
    timeline = ps.simulate(schedule, replace(BYTES, host_link=10))
    assert table(timeline) == [
        "0F0 0-1 holds 10",
        "0F1 1-2 holds 20",
        "0OFFLOAD0 1-2 holds 10",
        "0F2 2-3 holds 20",
        "0OFFLOAD1 2-3 holds 10",
        "0RELOAD0 3-4 holds 20",
        "0B2 3-5 holds 10",
        "0RELOAD1 5-6 holds 20",
        "0B0 5-7 holds 10",
        "0B1 7-9 holds 0",
    ]
    assert timeline.idle_seconds == (0.0,)


def test_a_slow_link_makes_its_rank_wait_and_the_wait_is_explained() -> None:
    schedule = add_offload(read_schedule(ORDER), [(0, 0)])
    prices = replace(BYTES, host_link=4)
    timeline = ps.simulate(schedule, prices)
    # The copy takes 2.5 seconds: out behind 0F0 until 3.5, back until 6.
    assert [s for s in table(timeline) if "LOAD" in s] == [
        "0OFFLOAD0 1-3.5 holds 10",
        "0RELOAD0 3.5-6 holds 20",
    ]
    assert timeline.end_time == 12
    assert timeline.idle_seconds == (3.0,)
    path = [str(span.action) for span in ps.explain(schedule, prices).critical_path]
    assert path == ["0F0", "0OFFLOAD0", "0RELOAD0", "0B0", "0B1", "0B2"]
    idle = find_waits(timeline).idle
    assert sum(idle.work.values()) + idle.transfer + idle.pauses + idle.edges == pytest.approx(3)
    assert ps.simulate(schedule, BYTES).end_time == 9


def test_copies_to_the_host_keep_the_order_of_their_forwards() -> None:
    schedule = read_schedule("0F0 0F1 0OFFLOAD1 0OFFLOAD0 0RELOAD0 0RELOAD1 0B0 0B1")
    spans = table(ps.simulate(schedule, replace(BYTES, host_link=10)))
    assert [s.split(" holds")[0] for s in spans[2:6]] == [
        "0OFFLOAD1 2-3",
        "0OFFLOAD0 1-3",
        "0RELOAD0 3-4",
        "0RELOAD1 3-5",
    ]


def test_larger_microbatches_take_longer_to_recompute_and_to_copy() -> None:
    schedule = add_offload(add_recompute(read_schedule(ORDER), [(0, 1)]), [(0, 0)])
    prices = replace(BYTES, host_link=10, microbatch_scale=[2, 3, 1])
    found = {
        str(s.action): (s.end - s.start, s.bytes) for s in ps.simulate(schedule, prices).spans(0)
    }
    assert found["0RECOMPUTE1"][0] == 3
    assert found["0RELOAD0"][0] == 2
    assert found["0F1"][1] == 20 + 3 * 2


def test_a_link_needs_a_speed() -> None:
    with pytest.raises(CostsError, match="host_link must be above 0"):
        ps.Costs(host_link=0)


@given(st.data())
def test_messages_cost_nothing_more_and_bytes_depend_on_the_order_alone(
    data: st.DataObject,
) -> None:
    plain = data.draw(
        schedules(max_ranks=4, max_microbatches=5).filter(lambda s: not s.is_forward_only)
    )
    schedule = data.draw(with_memory_actions(plain))
    prices = data.draw(costs(schedule))
    prices = replace(prices, activation_bytes=8.0, message_bytes=2.0, weight_stash_bytes=4.0)
    slow, lowered = replace(prices, host_link=2.0), ps.lower(schedule)
    implied, explicit = (ps.simulate(order, slow) for order in (schedule, lowered))
    assert implied.rank_peak_bytes == explicit.rank_peak_bytes
    assert implied.rank_peak_bytes == ps.simulate(schedule, prices).rank_peak_bytes
    assert (
        implied.end_time
        >= ps.simulate(schedule, prices).end_time
        >= ps.simulate(plain, prices).end_time
    )
    # The last row of a rank lets go of everything.
    last = implied.memory[schedule.rows.first[1:] - 1]
    bare = ps.simulate(plain, prices).memory[plain.rows.first[1:] - 1]
    np.testing.assert_allclose(last, bare, atol=1e-9)
