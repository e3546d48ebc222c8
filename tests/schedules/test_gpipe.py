from penstock.schedules.gpipe import gpipe
from penstock.sim.engine import simulate
from tests.schedules.tables import read_table


def test_all_forwards_come_before_all_backwards() -> None:
    assert gpipe(3, 3) == read_table(
        "0F0 0F1 0F2                         0B0     0B1     0B2",
        "    1F0 1F1 1F2             1B0     1B1     1B2",
        "        2F0 2F1 2F2 2B0     2B1     2B2",
    )


def test_every_rank_holds_every_microbatch() -> None:
    assert simulate(gpipe(3, 5)).rank_peak_activations == (5, 5, 5)
