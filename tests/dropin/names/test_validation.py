from typing import Literal

import pytest

from penstock.dropin.names.actions import _Action
from penstock.dropin.names.lists import OrderError, list_actions
from penstock.dropin.names.passes import _defer_recv_ops, lower_order
from penstock.dropin.names.validation import _validate_schedule
from penstock.errors import ScheduleError
from tests.covering import all_but_slow
from tests.dropin.incumbent import (
    FAMILIES,
    compute_order,
    pipelining,
    rank_of_stage,
    read_order,
    to_torch,
)

RECEIVES: tuple[Literal["early", "late"], ...] = ("early", "late")


@pytest.mark.parametrize(
    "lines",
    [
        ("0F0 0B0", "1F0 1B0"),
        ("0F0 0I0 0W0", "1F0 1I0 1W0"),
        ("0F0 . . 0B0", ". 1F0 1B0 ."),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD", "1F0 1B0"),
        ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
    ],
)
def test_valid_orders_pass(lines: tuple[str, ...]) -> None:
    assert _validate_schedule(read_order(*lines), 2, 2, 1) == {0: 0, 1: 1}


@pytest.mark.parametrize("ranks", all_but_slow([1, 2, 3, 5], [1, 3]))
@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_stage_map_is_that_of_torch_before_and_after_lowering(
    name: str, stages_per_rank: int, ranks: int
) -> None:
    for microbatches in (1, 2, 5):
        order = compute_order(name, ranks, microbatches, stages_per_rank)
        sizes = (ranks, ranks * stages_per_rank, microbatches)
        holder = _validate_schedule(order, *sizes)
        assert holder == pipelining._validate_schedule(to_torch(order), *sizes)
        for receives in RECEIVES:
            lowered = list_actions(lower_order(order, holder, microbatches, receives=receives))
            assert _validate_schedule(lowered, *sizes) == holder


def test_stages_may_lie_anywhere() -> None:
    order = read_order(
        "0F0 1F0  .   .  4F0 4B0  .   .  1B0 0B0",
        " .   .  2F0 3F0  .   .  3B0 2B0  .   . ",
    )
    assert _validate_schedule(order, 2, 5, 1) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 0}


def test_sends_that_would_have_to_be_buffered_are_accepted() -> None:
    """Let both ranks send before they post their receives: torch's sends do not wait."""
    order = read_order(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    assert _validate_schedule(order, 2, 2, 2) == {0: 0, 1: 1}


# What torch's validator lets pass although it cannot be run, or not as it is written.
ACCEPTED_BY_TORCH = {
    "microbatches counted from 1": (
        ("0F1 0B1", "1F1 1B1"),
        "rank 0, position 0, 0F1: microbatches must be from 0 to 0 (rule: numbering)\n"
        "  rank 0: [0F1] 0B1",
    ),
    "a forward twice": (
        ("0F0 0B0", "1F0 1B0 1F0"),
        "rank 1, position 2, 1F0: appears 2 times (rule: once)\n  rank 1: 1F0 1B0 [1F0]",
    ),
    "a message before what it sends": (
        ("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        "rank 0, position 0, 0SEND_F0: comes before what it sends is made (rule: messages)\n"
        "  rank 0: [0SEND_F0] 0F0 0RECV_B0 0B0",
    ),
    "a message that is missing": (
        ("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        "rank 0, 0SEND_F0: is missing (rule: messages)",
    ),
}


@pytest.mark.parametrize("case", ACCEPTED_BY_TORCH)
def test_nonsense_that_torch_accepts_is_refused(case: str) -> None:
    lines, message = ACCEPTED_BY_TORCH[case]
    order = read_order(*lines)
    assert pipelining._validate_schedule(to_torch(order), 2, 2, 1) == {0: 0, 1: 1}
    with pytest.raises(AssertionError) as caught:
        _validate_schedule(order, 2, 2, 1)
    assert str(caught.value) == message


def test_backwards_are_not_merely_counted() -> None:
    """Repeat one backward and leave out another, so that the number is right."""
    order = read_order("0F0 0F1 0B0 0I0 0W0", "1F0 1F1 1B0 1B1")
    pipelining._validate_schedule(to_torch(order), 2, 2, 2)
    with pytest.raises(AssertionError, match="rank 0, 0B1: is missing"):
        _validate_schedule(order, 2, 2, 2)


def test_deadlock_is_named_as_a_cycle() -> None:
    order = read_order("0F0 0B0 0F1 0B1", ". 1F0 1F1 1B0 1B1")
    pipelining._validate_schedule(to_torch(order), 2, 2, 2)
    with pytest.raises(OrderError) as caught:
        _validate_schedule(order, 2, 2, 2)
    assert str(caught.value) == (
        "rank 0, position 1, 0B0: deadlock: these actions wait for each other (rule: deadlock)\n"
        "  rank 0, position 1, 0B0 waits for rank 1, position 2, 1B0\n"
        "  rank 1, position 1, 1F1 waits for rank 0, position 2, 0F1"
    )


def test_send_after_what_depends_on_it_is_a_deadlock() -> None:
    order = read_order(
        "0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    pipelining._validate_schedule(to_torch(order), 2, 2, 2)
    with pytest.raises(AssertionError, match="rule: deadlock"):
        _validate_schedule(order, 2, 2, 2)


def test_messages_that_would_be_mixed_up_are_refused() -> None:
    """Torch's own way of putting receives late does that to schedules in V shape."""
    order = compute_order("ZBVZeroBubble", 2, 3, 2)
    holder = rank_of_stage(order)
    lowered = list_actions(lower_order(order, holder, 3))
    with pytest.raises(AssertionError, match="rule: channel order"):
        _validate_schedule(_defer_recv_ops(lowered, holder.__getitem__), 2, 4, 3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("0F0 0B0",), r"one list for each of 2 ranks, numbered from 0 \(got \[0\]\)"),
        (("0F0", "1F0"), "no rank runs a backward"),
        (("0F0 0B0", "1F0"), "1B0: is missing"),
        (("0B0", "1F0 1B0"), "0F0: is missing"),
        (("0B0 0F0", "1F0 1B0"), "0B0: comes before its forward has ended"),
        (("0F0 0W0 0I0", "1F0 1B0"), "0W0: comes before its input half has ended"),
        (("0F0 0B0 0I0 0W0", "1F0 1B0"), "0B0: the backward is both whole and split"),
        (("0F0 0I0", "1F0 1B0"), "0I0: its other half 0W0 is missing"),
        (("0F0 0B0", "0F0 0B0"), "rank 1, position 0, 0F0: stage 0 also runs on rank 0"),
        (("0F0 0B0", "2F0 2B0"), r"missing: \[1\], unknown: \[2\]"),
        (("0F0 1F0 1B0 0B0", ". ."), "rank 1 runs nothing"),
    ],
)
def test_broken_orders_are_refused(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        _validate_schedule(read_order(*lines), 2, 2, 1)
    assert isinstance(caught.value, ScheduleError)


def test_idle_slots_are_not_counted_in_positions_and_the_message_says_so() -> None:
    with pytest.raises(OrderError) as caught:
        _validate_schedule(read_order("0F0 0B0", ". 1F0 . 1B0 1F0"), 2, 2, 1)
    assert str(caught.value) == (
        "rank 1, position 2, 1F0: appears 2 times (rule: once)\n"
        "  rank 1: 1F0 1B0 [1F0]\n"
        "  (positions leave out idle slots)"
    )


def test_what_is_not_an_action_is_refused() -> None:
    order = {0: ["0F0", "0B0"], 1: [_Action.from_str("1F0")]}
    with pytest.raises(OrderError, match="rank 0, position 0: '0F0' is not an action"):
        _validate_schedule(order, 2, 2, 1)  # type: ignore[arg-type]  # on purpose
    without_microbatch = read_order("0F0 0B0", "1F0 1B0")
    first = without_microbatch[0][0]
    assert first is not None
    without_microbatch[0][0] = first._replace(microbatch_index=None)
    with pytest.raises(AssertionError, match="F takes a microbatch"):
        _validate_schedule(without_microbatch, 2, 2, 1)
