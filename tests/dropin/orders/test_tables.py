"""The orders of torch's schedule classes, idle slots included, compared with torch's own."""

from collections.abc import Iterable
from itertools import product

import pytest

from penstock.assembly import build
from penstock.dropin.names.lists import OrderError
from penstock.dropin.names.validation import _validate_schedule
from penstock.dropin.orders.tables import (
    _get_1f1b_rank_ops,
    _get_warmup_ops,
    add_bubbles,
    build_order,
    order_of_rank,
)
from penstock.errors import ScheduleError, ScheduleNameError, SizeError
from penstock.ir.placement import Placement
from tests.covering import all_but_slow
from tests.dropin.incumbent import (
    FAMILIES,
    needs,
    pipelining,
    read_order,
    texts,
    to_torch,
    torch_order,
)
from tests.strategies import FAMILY_NAMES

OTHERS = [family for family in FAMILIES if family[0] != "1F1B"]


def assert_orders_alike(
    name: str, stages_per_rank: int, ranks: int, microbatches: Iterable[int]
) -> None:
    expected = {size: torch_order(name, ranks, size, stages_per_rank) for size in microbatches}
    known = {size: order for size, order in expected.items() if order is not None}
    assert known
    assert known == {
        size: texts(build_order(name, ranks, size, stages_per_rank)) for size in known
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("name", "stages_per_rank"), OTHERS)
def test_order_is_the_one_of_torch_wherever_torch_has_one(
    name: str, stages_per_rank: int, ranks: int
) -> None:
    assert_orders_alike(name, stages_per_rank, ranks, (1, 2, 3, 5, 6, 8, 12, 16))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize(("name", "stages_per_rank"), OTHERS)
def test_order_is_the_one_of_torch_for_every_number_of_microbatches(
    name: str, stages_per_rank: int, ranks: int
) -> None:
    assert_orders_alike(name, stages_per_rank, ranks, range(1, 25))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_one_f_one_b_is_that_of_torch_but_for_a_slip_on_its_last_rank(ranks: int) -> None:
    """There torch counts forwards from 1, so that the first is missing and one is too many."""
    for microbatches in range(ranks, 18):
        theirs = torch_order("1F1B", ranks, microbatches, 1)
        assert theirs is not None
        ours = texts(build_order("1F1B", ranks, microbatches))
        last = ranks - 1
        theirs[last] = [
            f"{last}F{int(text.partition('F')[2]) - 1}" if text.startswith(f"{last}F") else text
            for text in theirs[last]
        ]
        assert ours == theirs


@pytest.mark.parametrize("ranks", all_but_slow([1, 2, 3, 5], [1, 3]))
@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_every_order_is_valid_also_where_torch_has_none(
    name: str, stages_per_rank: int, ranks: int
) -> None:
    for microbatches in (10, 11, 13) if name == "DualPipeV" else (1, 2, 5, 7, 11):
        order = build_order(name, ranks, microbatches, stages_per_rank)
        holder = _validate_schedule(order, ranks, ranks * stages_per_rank, microbatches)
        style = Placement.v if name in ("ZBVZeroBubble", "DualPipeV") else Placement.loop
        schedule = build(
            name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
        )
        assert tuple(holder.values()) == schedule.placement.rank_of_stage
        assert schedule.placement == style(ranks, stages_per_rank)


def test_orders_can_be_had_rank_by_rank() -> None:
    for name in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        expected = {rank: order_of_rank(name, rank, 3, 6) for rank in range(3)}
        assert build_order(name, 3, 6) == expected
    bare = {rank: order_of_rank("InterleavedZeroBubble", rank, 3, 6) for rank in range(3)}
    assert build_order("InterleavedZeroBubble", 3, 6) == add_bubbles(bare, 6)


def test_small_orders_as_tables() -> None:
    assert build_order("GPipe", 2, 2) == read_order(
        "0F0 0F1 0B0 0B1 0REDUCE_GRAD",
        "1F0 1F1 1B0 1B1 1REDUCE_GRAD",
    )
    assert build_order("ScheduleInterleaved1F1B", 2, 2) == read_order(
        "0F0 0F1 2F0 2F1  .  .  .  2B0  .  2B1  .  0B0  .  0B1",
        " .  1F0 1F1  .  3F0 3B0 3F1 3B1  .  1B0  .  1B1",
    )
    assert build_order("ZBVZeroBubble", 2, 2) == read_order(
        "0F0 0F1  .  3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0  .   .   .  0I1 0W1  .   . ",
        " .  1F0 2F0 1F1 2F1 2I0 2W0  .  1I0 1W0  .  2I1 2W1 1I1  .   .  1W1  .   . ",
    )


def test_names_are_those_of_families_and_of_torch_classes_in_any_case() -> None:
    expected = build_order("ZBV", 2, 4)
    for name in ("ZBVZeroBubble", "zbvzerobubble", "ScheduleZBVZeroBubble"):
        assert build_order(name, 2, 4) == expected
    with pytest.raises(ScheduleNameError, match="unknown schedule '2F2B'"):
        build_order("2F2B", 2, 4)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_families_that_torch_lacks_come_without_idle_slots(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    order = build_order(name, 4, 8)
    for rank, expected in enumerate(schedule.orders):
        compute = [str(action) for action in order[rank] if action and action.is_compute_op]
        assert compute == [str(work) for work in expected]


def test_impossible_sizes_are_refused_as_torch_does_it() -> None:
    for name in ("ZBVZeroBubble", "DualPipeV"):
        for stages_per_rank in (1, 3):
            assert torch_order(name, 2, 8, stages_per_rank) is None
            with pytest.raises(ValueError, match="2 stages per rank"):
                build_order(name, 2, 8, stages_per_rank)
    assert torch_order("DualPipeV", 4, 7, 2) is None
    with pytest.raises(SizeError) as caught:
        build_order("DualPipeV", 4, 7)
    assert str(caught.value) == (
        "DualPipeV takes at least one microbatch per stage (microbatches: 7, stages: 8); "
        "use 8 or more, or ZBVZeroBubble"
    )
    with pytest.raises(SizeError, match="microbatches must be at least 1"):
        build_order("GPipe", 2, 0)


@needs("_get_warmup_ops")
def test_forwards_run_ahead_are_counted_as_torch_does_it() -> None:
    for sizes in product(range(4), (1, 2, 3), (1, 2, 4), (4, 5), (1, 3, 8), (1, 2)):
        assert _get_warmup_ops(*sizes) == pipelining._get_warmup_ops(*sizes)


@pytest.mark.parametrize("is_zero_bubble", [False, True])
def test_interleaved_orders_from_stage_functions_are_those_of_torch(is_zero_bubble: bool) -> None:
    for ranks, local, microbatches in product((1, 2, 4), (1, 2, 3), (1, 2, 5, 8)):
        size = microbatches // max(1, microbatches // ranks)
        for rank in range(ranks):
            ahead = _get_warmup_ops(rank, local, size, ranks, microbatches, 1 + is_zero_bubble)
            rest = local * microbatches - ahead

            def forward(step: int, size: int = size, local: int = local) -> int:
                return step // size % local + 10

            def backward(step: int, size: int = size, local: int = local) -> int:
                return 10 - step // size % local + local

            sizes = (local, ranks, ahead, rest, ahead, rank)
            ours = _get_1f1b_rank_ops(*sizes, forward, backward, rank, is_zero_bubble)
            theirs = pipelining._get_1f1b_rank_ops(*sizes, forward, backward, rank, is_zero_bubble)
            assert [str(slot) for slot in ours] == [str(slot) for slot in theirs]


def test_bubbles_hold_back_forwards_and_whole_backwards() -> None:
    order = read_order("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 . 1B1")
    assert add_bubbles(order, 2) == read_order("0F0 0F1 . 0B0 . . 0B1", ". 1F0 1B0 1F1 . 1B1")
    theirs = pipelining.ScheduleInterleavedZeroBubble.__new__(
        pipelining.ScheduleInterleavedZeroBubble
    )
    theirs.pipeline_order, theirs.pp_group_size = to_torch(order), 2
    assert texts(add_bubbles(order, 2)) == texts(theirs._add_bubbles_to_actions(2))


def test_bubbles_do_not_help_an_order_that_never_finishes() -> None:
    """Torch looks for ever."""
    with pytest.raises(ScheduleError, match="the order never finishes"):
        add_bubbles(read_order("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), 2)
    with pytest.raises(OrderError, match="stage 0 also runs on rank 0"):
        add_bubbles(read_order("0F0 0B0", "0F1 0B1"), 2)
