"""Which rank holds which stage."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir.placement import Placement


def test_loop_goes_round_the_ranks() -> None:
    placement = Placement.loop(3, 2)
    assert placement.rank_of_stage == (0, 1, 2, 0, 1, 2)
    assert [placement.stages(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert (placement.num_ranks, placement.num_stages) == (3, 6)


def test_v_turns_at_the_last_rank() -> None:
    assert Placement.v(3).rank_of_stage == (0, 1, 2, 2, 1, 0)
    assert Placement.v(2, 3).rank_of_stage == (0, 1, 1, 0, 0, 1)


@pytest.mark.parametrize(
    ("ranks", "style"),
    [
        ((0,), "loop"),
        ((0, 1, 2), "loop"),
        ((0, 1, 0, 1), "interleaved"),
        ((0, 0), "interleaved"),
        ((0, 1, 1, 0), "v"),
        ((0, 1, 1, 0, 0, 1), "v"),
        ((0, 0, 1, 1), "free"),
        ((1, 0), "free"),
        ((0, 1, 0), "free"),
    ],
)
def test_style_is_read_off_the_ranks(ranks: tuple[int, ...], style: str) -> None:
    assert Placement(ranks).style == style


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((), "a placement needs at least one stage"),
        (
            (0, 2, 4),
            "every rank from 0 up must hold a stage (placement: (0, 2, 4), "
            "without a stage: [1, 3]); number the ranks without gaps",
        ),
        (
            (-1, 0),
            "every rank from 0 up must hold a stage (placement: (-1, 0), "
            "without a stage: []); number the ranks without gaps",
        ),
    ],
)
def test_rank_without_a_stage_is_refused(ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Placement(ranks)
    assert str(caught.value) == message
