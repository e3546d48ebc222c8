"""Parameters that are gathered before use and let go when others need the room."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build
from penstock.checks.report import find_problems
from penstock.errors import SizeError
from penstock.ir.actions import Action, Kind, Overlap, Work
from penstock.ir.schedule import Schedule
from penstock.passes.shard import add_unshard_reshard
from penstock.passes.thin import thin_out
from tests.strategies import schedules
from tests.tables import orders_of, read_orders, read_schedule

FOUR_STAGES = "0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (
            1,
            """
            0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1RESHARD 2UNSHARD 2F0 2RESHARD 3UNSHARD 3F0
            3B0 3RESHARD 2UNSHARD 2B0 2RESHARD 1UNSHARD 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD
            """,
        ),
        (
            2,
            """
            0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 1RESHARD 3UNSHARD 2F0 3F0
            3B0 3RESHARD 1UNSHARD 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD
            """,
        ),
        (
            3,
            """
            0UNSHARD 1UNSHARD 2UNSHARD 0F0 0RESHARD 3UNSHARD 1F0 2F0 3F0
            3B0 3RESHARD 0UNSHARD 2B0 2RESHARD 1B0 1RESHARD 0B0 0RESHARD
            """,
        ),
        (
            4,
            """
            0UNSHARD 1UNSHARD 2UNSHARD 3UNSHARD 0F0 1F0 2F0 3F0
            3B0 3RESHARD 2B0 2RESHARD 1B0 1RESHARD 0B0 0RESHARD
            """,
        ),
    ],
)
def test_stages_are_gathered_ahead_as_far_as_the_limit_allows(limit: int, expected: str) -> None:
    result = add_unshard_reshard(read_schedule(FOUR_STAGES), whole_stages=limit)
    assert orders_of(result) == [expected.split()]


def test_each_rank_keeps_its_own_count() -> None:
    schedule = read_schedule("""
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
    """)
    expected = """
        0UNSHARD 0F0 0RESHARD 3UNSHARD 3F0 3B0 3RESHARD 0UNSHARD 0B0 0RESHARD
        1UNSHARD 1F0 1RESHARD 2UNSHARD 2F0 2B0 2RESHARD 1UNSHARD 1B0 1RESHARD
    """
    assert orders_of(add_unshard_reshard(schedule, whole_stages=1)) == read_orders(expected)


def test_overlap_has_all_its_stages_whole() -> None:
    schedule = read_schedule("0F0 1F0 2F0 (0F1;2B0)OVERLAP_F_B 1B0 0B0 1F1 2F1 2B1 1B1 0B1")
    expected = """
        0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 1RESHARD 0UNSHARD 2F0
        (0F1;2B0)OVERLAP_F_B 2RESHARD 1UNSHARD 1B0 0B0 0RESHARD 2UNSHARD 1F1
        2F1 2B1 2RESHARD 0UNSHARD 1B1 1RESHARD 0B1 0RESHARD
    """
    assert orders_of(add_unshard_reshard(schedule, whole_stages=2)) == [expected.split()]


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(SizeError) as caught:
        add_unshard_reshard(read_schedule("0F0 0B0"), whole_stages=limit)
    assert str(caught.value) == f"whole_stages must be at least 1 (whole_stages: {limit})"


def test_limit_below_what_an_overlap_uses_is_refused() -> None:
    with pytest.raises(SizeError) as caught:
        add_unshard_reshard(build("DualPipeV", ranks=2, microbatches=4), whole_stages=1)
    assert str(caught.value) == (
        "an overlap uses 2 stages at once (whole_stages: 1); use whole_stages=2 or more"
    )


def test_without_a_limit_an_overlap_of_many_stages_has_them_all() -> None:
    # The user of a pipeline had not set the limit of three, and could not change it.
    work = "0F0 1F0 2F0 3F0 4F0 4B0 3B0 0F1 (1F1;2B0)OVERLAP_F_B 1B0 0B0"
    few = Schedule.from_orders([work.split()])
    many = Schedule.from_orders([work.replace("3B0 0F1 (1F1;2B0)", "(0F1;1F1;2B0;3B0)").split()])
    assert add_unshard_reshard(few) == add_unshard_reshard(few, whole_stages=3)
    assert add_unshard_reshard(many) == add_unshard_reshard(many, whole_stages=4)


@given(schedules(max_ranks=4, max_microbatches=6, max_stages_per_rank=6), st.integers(1, 3))
def test_whole_stages_stay_within_the_limit_and_serve_every_compute(
    schedule: Schedule, limit: int
) -> None:
    if schedule.rows.joined.any():
        limit = max(limit, 2)
    result = add_unshard_reshard(schedule, whole_stages=limit)
    for order, before in zip(result.orders, schedule.orders, strict=True):
        whole: set[int] = set()
        work_order: list[Work] = []
        for work in order:
            match work:
                case Action(kind=Kind.UNSHARD, stage=stage):
                    assert stage not in whole
                    whole.add(stage)
                    assert len(whole) <= limit
                case Action(kind=Kind.RESHARD, stage=stage):
                    whole.remove(stage)
                case Overlap(actions=members):
                    assert {action.stage for action in members} <= whole
                    work_order.append(work)
                case Action(stage=stage):
                    assert stage in whole
                    work_order.append(work)
        assert not whole
        assert tuple(work_order) == before
    assert find_problems(replace(result, name="sharded")) == ()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_copy_of_a_stage_that_is_left_without_work_is_not_gathered(microbatches: int) -> None:
    # Its first and last use were whatever the memory of an empty array held.
    thinned = thin_out(build("DualPipe", ranks=4, microbatches=3), microbatches)
    gathered = add_unshard_reshard(thinned)
    used = set(thinned.rows.stage.tolist())
    for kind in (Kind.UNSHARD, Kind.RESHARD):
        rows = gathered.rows.stage[gathered.rows.is_kind(kind)]
        assert sorted(rows.tolist()) == sorted(used)
