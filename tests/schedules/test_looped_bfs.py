from penstock.schedules.gpipe import gpipe
from penstock.schedules.looped_bfs import looped_bfs
from tests.schedules.tables import read_table


def test_backward_retraces_the_steps_of_the_forward() -> None:
    assert looped_bfs(2, 3) == read_table(
        "0F0 0F1 0F2 2F0 2F1 2F2             2B2     2B1     2B0     0B2     0B1     0B0",
        "    1F0 1F1 1F2 3F0 3F1 3F2 3B2     3B1     3B0     1B2     1B1     1B0",
    )


def test_one_stage_per_rank_is_gpipe_with_the_last_microbatch_back_first() -> None:
    looped, plain = looped_bfs(3, 4, 1), gpipe(3, 4)
    assert [order[:4] for order in looped.orders] == [order[:4] for order in plain.orders]
    assert [order[:3:-1] for order in looped.orders] == [order[4:] for order in plain.orders]
