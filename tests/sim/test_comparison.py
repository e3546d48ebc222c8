"""Schedules side by side, all for one and the same model."""

import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import CostsError
from penstock.sim.comparison import compare, costs_for


def test_single_numbers_are_shared_among_the_stages_of_a_rank() -> None:
    costs = costs_for(build("ZBV", ranks=2, microbatches=2), Costs(forward=6, transfer=1))
    assert costs.forward == (3, 3, 3, 3)
    assert costs.transfer == 1


def test_lists_follow_the_model_whatever_the_placement() -> None:
    costs = Costs(forward=[1, 2, 3, 4])
    assert costs_for(build("ZBV", ranks=2, microbatches=2), costs).forward == (1, 2, 3, 4)
    assert costs_for(build("1F1B", ranks=2, microbatches=2), costs).forward == (3, 7)


def test_copies_of_the_model_cost_the_same() -> None:
    costs = costs_for(build("DualPipe", ranks=2, microbatches=2), Costs(forward=[1, 2]))
    assert costs.forward == (1, 2, 1, 2)


def test_every_schedule_does_the_same_work() -> None:
    names = ("1F1B", "Interleaved1F1B", "ZBV", "DualPipe", "DualPipeV", "V-Half")
    schedules = [build(name, ranks=4, microbatches=8) for name in names]
    costs = Costs(forward=2, backward_input=3, backward_weight=1)
    timelines = compare(schedules, costs)
    assert tuple(timelines) == names
    assert {name: timeline.busy_seconds for name, timeline in timelines.items()} == dict.fromkeys(
        names, (8 * 6,) * 4
    )


def test_schedules_of_one_name_are_kept_apart() -> None:
    schedule = build("1F1B", ranks=2, microbatches=2)
    assert list(compare([schedule] * 3)) == ["1F1B", "1F1B (2)", "1F1B (3)"]


def test_model_that_cannot_be_cut_that_way_is_refused() -> None:
    with pytest.raises(CostsError) as caught:
        compare([build("1F1B", ranks=2, microbatches=2)], Costs(forward=[1, 2, 3]))
    assert str(caught.value) == (
        "forward has 3 values, which cannot be divided evenly among 2 stages"
    )
