"""Passes over lists of actions, compared with torch's own action by action."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

import pytest

from penstock.assembly import build, lower
from penstock.checks.report import find_problems
from penstock.dropin.names.actions import B, I, W, _Action, _ComputationType
from penstock.dropin.names.lists import Order, OrderError, list_actions, make_schedule
from penstock.dropin.names.passes import (
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _defer_recv_ops,
    _merge_bw,
    _requires_reduce_grad,
    lower_order,
)
from penstock.errors import SizeError
from penstock.ir.schedule import Schedule
from penstock.passes.backward import split_backward
from tests.dropin.incumbent import (
    FAMILIES,
    Texts,
    compute_order,
    needs,
    pipelining,
    rank_of_stage,
    read_order,
    texts,
    to_torch,
)

SIZES = [*product((1, 2, 3), (1, 2, 5)), (5, 4)]


def orders(name: str, stages_per_rank: int) -> Iterator[tuple[Order, int]]:
    """Yield orders of a family in many sizes, with and without idle slots."""
    random = Random(5)
    for ranks, microbatches in SIZES:
        order = compute_order(name, ranks, microbatches, stages_per_rank)
        yield order, microbatches
        for slots in order.values():
            for _ in range(random.randrange(6)):
                slots.insert(random.randrange(len(slots) + 1), None)
        yield order, microbatches


def apply(change: Callable[..., Any], order: Any, *options: int) -> Texts:
    """Apply a pass over one rank to every rank."""
    return texts({rank: change(slots, *options) for rank, slots in order.items()})


@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_stages_are_gathered_and_let_go_as_torch_does_it(name: str, stages_per_rank: int) -> None:
    for order, _ in orders(name, stages_per_rank):
        expected = apply(pipelining._add_unshard_reshard, to_torch(order))
        assert apply(_add_unshard_reshard, order) == expected
        if name != "DualPipeV":
            for limit in (1, 2):
                expected = apply(pipelining._add_unshard_reshard, to_torch(order), limit)
                assert apply(_add_unshard_reshard, order, limit) == expected


@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_gradients_are_reduced_as_torch_does_it(name: str, stages_per_rank: int) -> None:
    for order, microbatches in orders(name, stages_per_rank):
        for number in (microbatches, microbatches + 1):
            expected = apply(pipelining._add_reduce_grad, to_torch(order), number)
            assert apply(_add_reduce_grad, order, number) == expected


@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_backwards_are_merged_as_torch_does_it(name: str, stages_per_rank: int) -> None:
    for order, _ in orders(name, stages_per_rank):
        assert apply(_merge_bw, order) == apply(pipelining._merge_bw, to_torch(order))


@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_messages_stand_where_torch_puts_them(name: str, stages_per_rank: int) -> None:
    for order, _ in orders(name, stages_per_rank):
        holder = rank_of_stage(order)
        expected = pipelining._add_send_recv(to_torch(order), holder.__getitem__, len(holder))
        found = _add_send_recv(order, stage_to_rank=holder.__getitem__, num_stages=len(holder))
        assert texts(found) == texts(expected)


@needs("_defer_recv_ops")
@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_receives_are_deferred_as_torch_does_it(name: str, stages_per_rank: int) -> None:
    for order, _ in orders(name, stages_per_rank):
        holder = rank_of_stage(order)
        lowered = _add_send_recv(order, holder.__getitem__, len(holder))
        expected = pipelining._defer_recv_ops(to_torch(dict(lowered)), holder.__getitem__)
        assert texts(_defer_recv_ops(lowered, holder.__getitem__)) == texts(expected)


def test_pieces_of_a_schedule_are_passed_through_too() -> None:
    """Stages with gaps between them, some without forwards, and nothing at all."""
    order = read_order(". 12F0 . 3F0 12I0 . 12W0 3I0 12F1 3W0 . 12B1 7F0 3B1", ". .", "")
    for ours, theirs in (
        (_merge_bw, pipelining._merge_bw),
        (_add_unshard_reshard, pipelining._add_unshard_reshard),
        (lambda slots: _add_reduce_grad(slots, 2), lambda s: pipelining._add_reduce_grad(s, 2)),
    ):
        assert apply(ours, order) == apply(theirs, to_torch(order))


def test_weight_half_after_a_whole_backward_does_not_hinder_messages() -> None:
    order = read_order(
        "0F0 0F1 .   3F0 3B0 3F1 3B1 0B0 3W0 0B1 3W1 0W0 0W1",
        " .  1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 2W0 2W1 1W0 1W1",
    )
    placement = (0, 1, 1, 0)
    expected = pipelining._add_send_recv(to_torch(order), placement.__getitem__, 4)
    assert texts(_add_send_recv(order, placement.__getitem__, 4)) == texts(expected)


@needs("_defer_recv_ops")
def test_receives_are_deferred_in_pieces_of_a_schedule_too() -> None:
    order = read_order(
        "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0I0 0W0 0RECV_B1 0I1 0W1",
        "1RECV_F0 1RECV_F1 2RECV_B0 1F0 2F0 2SEND_F0 (1F1;2B0) 2W0 1B0 1SEND_B0 1W0",
    )
    lowered = {rank: [a for a in slots if a is not None] for rank, slots in order.items()}
    placement = (0, 1, 1, 0)
    expected = pipelining._defer_recv_ops(to_torch(order), placement.__getitem__)
    assert texts(_defer_recv_ops(lowered, placement.__getitem__)) == texts(expected)


@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_lowering_is_that_of_torch(name: str, stages_per_rank: int) -> None:
    for order, microbatches in orders(name, stages_per_rank):
        holder = rank_of_stage(order)
        gathered = {
            rank: pipelining._add_reduce_grad(pipelining._add_unshard_reshard(slots), microbatches)
            for rank, slots in to_torch(order).items()
        }
        expected = pipelining._add_send_recv(gathered, holder.__getitem__, len(holder))
        found = list_actions(lower_order(order, holder, microbatches))
        assert texts(found) == texts(expected)


def rules_broken(schedule: Schedule, channels: Any = "shared") -> set[str]:
    """Return the rules that a lowered schedule breaks."""
    return {problem.rule for problem in find_problems(schedule, channels=channels)}


@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_late_receives_are_those_of_our_own_lowering(name: str, stages_per_rank: int) -> None:
    """Late receives are safe even if sends wait for them, and if both ways share a queue."""
    for order, microbatches in orders(name, stages_per_rank):
        holder = rank_of_stage(order)
        late = lower_order(order, holder, microbatches, receives="late")
        compute = [[str(action) for action in slots if action] for slots in order.values()]
        assert late == lower(Schedule.from_orders(compute), receives="late")
        assert rules_broken(late) == set()


def test_torch_mixes_up_messages_where_receives_may_overtake_one_another() -> None:
    """Rank 0 sends 0F2's output, then 3B0's gradient; rank 1 would take them the other way."""
    order = compute_order("ZBVZeroBubble", 2, 3, 2)
    holder = rank_of_stage(order)
    lowered = lower_order(order, holder, 3)
    deferred = _defer_recv_ops(list_actions(lowered), holder.__getitem__)
    theirs = make_schedule(deferred, holder, 3)
    assert rules_broken(theirs, "directed") == {"channel order"}
    assert rules_broken(lower_order(order, holder, 3, receives="late")) == set()


def test_passes_leave_their_argument_unchanged() -> None:
    order = compute_order("InterleavedZeroBubble", 2, 4, 2)
    order[0].insert(3, None)
    before = texts(order)
    holder = rank_of_stage(order)
    lowered = _add_send_recv(order, holder.__getitem__, 4)
    after_lowering = texts(lowered)
    _defer_recv_ops(lowered, holder.__getitem__)
    for slots in order.values():
        _merge_bw(slots)
        _add_unshard_reshard(slots)
        _add_reduce_grad(slots, 4)
    assert (texts(order), texts(lowered)) == (before, after_lowering)


def test_weight_gradients_come_from_weight_halves_and_whole_backwards() -> None:
    assert [kind for kind in _ComputationType if _requires_reduce_grad(kind)] == [W, B]


def test_order_that_never_finishes_gets_no_messages() -> None:
    order = read_order("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(AssertionError, match="the order never finishes"):
        _add_send_recv(order, (0, 1).__getitem__, 2)


def test_order_with_messages_gets_no_others() -> None:
    order = read_order("0F0 0SEND_F0", "1RECV_F0 1F0")
    with pytest.raises(OrderError, match="lower it only once"):
        _add_send_recv(order, (0, 1).__getitem__, 2)


def test_receive_that_nothing_uses_is_refused() -> None:
    actions = read_order("0F0 0SEND_F0 0RECV_B0")
    lowered = {0: [action for action in actions[0] if action is not None]}
    with pytest.raises(AssertionError, match="rank 0, 0RECV_B0: no work after it uses what"):
        _defer_recv_ops(lowered, (0, 1).__getitem__)


def test_limit_below_one_stage_is_refused() -> None:
    with pytest.raises(SizeError, match="at least 1"):
        _add_unshard_reshard([_Action(0, I, 0)], 0)


def test_limit_that_an_overlap_cannot_keep_is_refused() -> None:
    """Torch goes over the limit without a word."""
    slots = read_order("(0F3;7B1)")[0]
    with pytest.raises(SizeError, match="an overlap uses 2 stages at once"):
        _add_unshard_reshard(slots, 1)


@pytest.mark.parametrize("name", ["ZBV", "1F1B"])
def test_splitting_and_merging_of_whole_schedules_is_that_of_the_core(name: str) -> None:
    schedule = split_backward(build(name, ranks=4, microbatches=6))
    for order in schedule.orders:
        actions: Sequence[_Action | None] = [_Action.from_str(str(work)) for work in order]
        theirs = pipelining._merge_bw([pipelining._Action.from_str(str(work)) for work in order])
        assert [str(action) for action in _merge_bw(actions)] == [str(action) for action in theirs]
