"""Why ranks are idle, read off a timeline alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.sim.engine import simulate
from penstock.sim.explain import explain
from penstock.sim.waits import Idle, find_waits
from tests import strategies


@given(st.data())
def test_waits_of_a_simulated_timeline_match_its_explanation(data: st.DataObject) -> None:
    # Eighths of a second, and no two transfers of different length on the way to one action.
    schedule = data.draw(strategies.schedules(max_ranks=5, max_microbatches=6))
    costs = data.draw(strategies.costs(schedule))
    if data.draw(st.booleans()):
        schedule = lower(schedule)
    found, waits = explain(schedule, costs), find_waits(simulate(schedule, costs))
    spans = [waits.timeline.span(row) for row in waits.critical_path]
    assert tuple(spans) == found.critical_path
    assert waits.awaited == found.gaps


@given(st.data())
def test_reasons_add_up_to_the_idle_time(data: st.DataObject) -> None:
    schedule = data.draw(strategies.schedules(max_ranks=5, max_microbatches=6))
    timeline = simulate(schedule, data.draw(strategies.costs(schedule)))
    idle = find_waits(timeline).idle
    parts = [*idle.work.values(), idle.transfer, idle.pauses, idle.edges]
    assert sum(parts) == pytest.approx(sum(timeline.idle_seconds))
    assert min(parts) >= 0
    assert idle.pauses == 0


def test_a_wait_for_a_message_is_a_wait_for_the_work_that_made_it() -> None:
    schedule, costs = build("1F1B", ranks=3, microbatches=4), Costs(transfer=0.5)
    plain = find_waits(simulate(schedule, costs)).idle
    assert plain == find_waits(simulate(lower(schedule, receives=costs), costs)).idle
    work = {Kind.FORWARD: 1.5, Kind.FULL_BACKWARD: 12.5}
    assert plain == Idle(work, transfer=4.0, pauses=0.0, edges=12.0)


def test_time_in_which_a_rank_had_all_it_needed_is_a_pause() -> None:
    timeline = simulate(build("GPipe", ranks=1, microbatches=2))
    late = replace(timeline, start=timeline.start + np.arange(4), end=timeline.end + np.arange(4))
    assert find_waits(late).idle == Idle({}, transfer=0.0, pauses=3.0, edges=0.0)


def test_no_message_is_on_its_way_for_less_than_nothing() -> None:
    # A value that had arrived before its rank was free was on its way for -0.5 s in the next gap.
    timeline = simulate(lower(build("1F1B", ranks=2, microbatches=3)), Costs(transfer=0.25))
    schedule = timeline.schedule
    for row in np.flatnonzero(schedule.rows.is_compute).tolist():
        rank = schedule.rows.rank(row)
        later = np.arange(len(schedule.rows)) >= row
        later &= schedule.rows.rank_of_row() == rank
        paused = replace(
            timeline, start=timeline.start + 0.5 * later, end=timeline.end + 0.5 * later
        )
        gaps = find_waits(paused).awaited
        assert min((gap.transfer_seconds for gap in gaps), default=0.0) >= 0
