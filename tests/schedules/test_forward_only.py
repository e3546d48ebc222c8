from penstock.schedules.forward_only import forward_only
from tests.schedules.tables import read_table


def test_microbatches_follow_one_another_through_the_ranks() -> None:
    assert forward_only(3, 4) == read_table(
        "0F0 0F1 0F2 0F3",
        "    1F0 1F1 1F2 1F3",
        "        2F0 2F1 2F2 2F3",
    )


def test_stages_of_a_rank_take_turns_with_all_microbatches() -> None:
    assert forward_only(2, 2, 2) == read_table(
        "0F0 0F1 2F0 2F1",
        "    1F0 1F1 3F0 3F1",
    )


def test_it_is_known_as_forward_only() -> None:
    schedule = forward_only(2, 2)
    assert (schedule.name, schedule.is_forward_only) == ("ForwardOnly", True)
