import pytest

from penstock.assembly import build
from penstock.planner.search.in_flight import count_in_flight
from penstock.sim.engine import simulate
from tests.strategies import every_family


def test_one_f_one_b_keeps_as_many_in_flight_as_stages_follow() -> None:
    schedule = build("1F1B", ranks=4, microbatches=8)
    assert count_in_flight(schedule) == (4, 3, 2, 1)


def test_gpipe_keeps_all_in_flight() -> None:
    assert count_in_flight(build("GPipe", ranks=3, microbatches=5)) == (5, 5, 5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_never_holds_more_than_its_stages_together(ranks: int) -> None:
    for schedule in every_family(ranks, 8):
        counts = count_in_flight(schedule)
        placement = schedule.placement
        together = [sum(counts[s] for s in placement.stages(rank)) for rank in range(ranks)]
        peaks = simulate(schedule).rank_peak_activations
        assert all(peak <= most for peak, most in zip(peaks, together, strict=True))
        if placement.num_stages == ranks:
            assert tuple(together) == peaks
