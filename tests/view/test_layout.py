import numpy as np
import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.layout import LANE_HEIGHT, Rectangles, rectangles
from tests.view.timelines import EVERY_FAMILY, EVERY_NAME, timeline_of

every_timeline = pytest.mark.parametrize(
    "timeline",
    [
        pytest.param(EVERY_FAMILY[name], marks=each.marks, id=name)
        for name, each in zip(EVERY_FAMILY, EVERY_NAME, strict=True)
    ],
)


def corners(bars: Rectangles) -> list[tuple[float, float, float, float]]:
    columns = (bars.left, bars.right, bars.top, bars.bottom)
    return list(zip(*(np.round(column, 9).tolist() for column in columns), strict=True))


@every_timeline
def test_every_action_is_drawn_on_its_rank_at_its_time(timeline: Timeline) -> None:
    bars = rectangles(timeline)
    spans = [span for rank in range(timeline.schedule.num_ranks) for span in timeline.spans(rank)]
    actions = [timeline.schedule.rows.action(row) for row in bars.row.tolist()]
    assert actions == [span.action for span in spans]
    assert bars.rank.tolist() == [span.rank for span in spans]
    assert bars.left.tolist() == [span.start for span in spans]
    assert bars.right.tolist() == [span.end for span in spans]
    assert bars.is_overlapped.tolist() == [span.is_overlapped for span in spans]


@every_timeline
def test_every_bar_is_on_the_lane_of_the_rank_that_holds_its_stage(timeline: Timeline) -> None:
    bars = rectangles(timeline)
    holder = np.array(timeline.schedule.placement.rank_of_stage)
    stages = timeline.schedule.rows.stage[bars.row]
    assert (np.rint((bars.top + bars.bottom) / 2) == holder[stages]).all()
    assert (bars.top >= holder[stages] - LANE_HEIGHT / 2).all()
    assert (bars.bottom <= holder[stages] + LANE_HEIGHT / 2).all()


@every_timeline
def test_bars_do_not_cover_each_other(timeline: Timeline) -> None:
    bars = rectangles(timeline)
    # Half lanes are enough: an overlapped pair has one each, other bars have both.
    for half in (bars.top < bars.rank, bars.bottom > bars.rank):
        order = np.lexsort((bars.left[half], bars.rank[half]))
        rank, left, right = (c[half][order] for c in (bars.rank, bars.left, bars.right))
        assert ((left[1:] >= right[:-1] - 1e-9) | (rank[1:] != rank[:-1])).all()


def test_overlapped_pair_has_its_forward_above_in_either_order() -> None:
    # The first pair is written forward first, the second backward first.
    for pair in ("(0F1;0B0)OVERLAP_F_B", "(0B0;0F1)OVERLAP_F_B"):
        timeline = simulate(Schedule.from_orders([["0F0", pair, "0B1"]]))
        bars = rectangles(timeline)
        found = {
            str(timeline.schedule.rows.action(row)): corner
            for row, corner in zip(bars.row.tolist(), corners(bars), strict=True)
        }
        assert found == {
            "0F0": (0, 1, -0.42, 0.42),
            "0F1": (1, 4, -0.42, 0),
            "0B0": (1, 4, 0, 0.42),
            "0B1": (4, 6, -0.42, 0.42),
        }


def test_lowering_adds_no_bars() -> None:
    schedule = build("ZBV", ranks=4, microbatches=8)
    plain, lowered = (rectangles(simulate(s)) for s in (schedule, lower(schedule)))
    assert corners(lowered) == corners(plain)


def test_sends_are_drawn_when_they_take_time_and_receives_when_asked_for() -> None:
    timeline = simulate(
        lower(build("1F1B", ranks=2, microbatches=2)), Costs(send=0.5, transfer=0.25)
    )
    drawn = [Kind.FORWARD, Kind.FULL_BACKWARD, Kind.SEND_F, Kind.SEND_B]
    assert rectangles(timeline).kinds == drawn
    receives = rectangles(timeline, kinds=[Kind.RECV_F])
    assert receives.kinds == [Kind.RECV_F]
    assert len(receives) == 2


def test_local_stage_counts_the_stages_of_a_rank() -> None:
    bars = rectangles(timeline_of("ZBV", 2, 4))
    stages = timeline_of("ZBV", 2, 4).schedule.rows.stage[bars.row]
    pairs = set(zip(bars.rank.tolist(), stages.tolist(), bars.local_stage.tolist(), strict=True))
    assert pairs == {(0, 0, 0), (0, 3, 1), (1, 1, 0), (1, 2, 1)}


def test_timeline_of_zero_length_has_no_bars() -> None:
    costs = Costs(forward=0, backward_input=0, backward_weight=0)
    bars = rectangles(timeline_of("GPipe", 2, 2, costs))
    assert (len(bars), bars.kinds, bars.num_local_stages, bars.seconds) == (0, [], 1, 1.0)


def test_collectives_beside_compute_do_not_cover_it() -> None:
    schedule = Schedule.from_orders([["0F0", "1F0", "1B0", "0B0"]])
    costs = Costs(unshard=[1, 3], reduce_grad=[1, 4]).for_each_stage(2)
    timeline = simulate(schedule, costs)
    bars = rectangles(timeline)
    actions = [str(timeline.schedule.rows.action(row)) for row in bars.row.tolist()]
    found = zip(actions, bars.left.tolist(), bars.right.tolist(), strict=True)
    # 1UNSHARD runs from 1 to 4 and 1REDUCE_GRAD from 7 to 11.
    assert " ".join(f"{action}[{left:g},{right:g}]" for action, left, right in found) == (
        "0UNSHARD[0,1] 1UNSHARD[2,4] 0F0[1,2] 1F0[4,5] 1B0[5,7] "
        "1REDUCE_GRAD[9,11] 0B0[7,9] 0REDUCE_GRAD[11,12]"
    )
