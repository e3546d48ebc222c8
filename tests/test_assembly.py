"""From a name to a checked schedule, and from that to a lowered one."""

from typing import Any

import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import ArgumentError, ScheduleError, ScheduleNameError, SizeError
from penstock.ir.schedule import Schedule
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.passes.send_recv import add_send_recv, add_send_recv_by_cost, delay_receives
from penstock.passes.shard import add_unshard_reshard
from tests.tables import orders_of, read_orders


def one_after_the_other(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Run each microbatch forward and backward before the next one starts."""
    orders = [
        [
            text
            for microbatch in range(microbatches)
            for text in (
                *(f"{stage}F{microbatch}" for stage in stages),
                *(f"{stage}B{microbatch}" for stage in reversed(stages)),
            )
        ]
        for stages in (
            range(rank * stages_per_rank, (rank + 1) * stages_per_rank) for rank in range(ranks)
        )
    ]
    return Schedule.from_orders(orders, name="OneByOne")


def test_family_is_built_by_any_of_its_names() -> None:
    expected = build("1F1B", ranks=2, microbatches=3)
    for name in ("1f1b", "Schedule1F1B", "SCHEDULE1F1B"):
        assert build(name, ranks=2, microbatches=3) == expected
    assert expected.name == "1F1B"


def test_function_is_built_like_a_family() -> None:
    schedule = build(one_after_the_other, ranks=2, microbatches=2)
    expected = """
        0F0 0B0 0F1 0B1
        1F0 1B0 1F1 1B1
    """
    assert orders_of(schedule) == read_orders(expected)
    two = build(one_after_the_other, ranks=1, microbatches=1, stages_per_rank=2)
    assert orders_of(two) == [["0F0", "1F0", "1B0", "0B0"]]


def test_function_that_makes_a_wrong_schedule_is_refused() -> None:
    def without_backwards_at_the_end(ranks: int, microbatches: int, _: int) -> Schedule:
        rows = [[f"{rank}F{m}" for m in range(microbatches)] for rank in range(ranks)]
        return Schedule.from_orders([*rows[:-1], [*rows[-1], f"{ranks - 1}B0"]])

    with pytest.raises(ScheduleError) as caught:
        build(without_backwards_at_the_end, ranks=2, microbatches=1)
    assert str(caught.value) == "rank 0, 0B0: is missing (rule: once)"


@pytest.mark.parametrize(
    ("family", "sizes", "error", "message"),
    [
        (
            "1F1B",
            {"ranks": 0, "microbatches": 4},
            SizeError,
            "ranks must be at least 1 (ranks: 0)",
        ),
        (
            "1F1B",
            {"ranks": 2, "microbatches": 0},
            SizeError,
            "microbatches must be at least 1 (microbatches: 0)",
        ),
        (
            "LoopedBFS",
            {"ranks": 2, "microbatches": 2, "stages_per_rank": 0},
            SizeError,
            "stages_per_rank must be at least 1 (stages_per_rank: 0)",
        ),
        (
            "1F1B",
            {"ranks": 2, "microbatches": 2, "stages_per_rank": 2},
            SizeError,
            "1F1B has 1 stage per rank (stages_per_rank: 2); "
            "use stages_per_rank=1, or Interleaved1F1B for more",
        ),
        (
            "1F2B",
            {"ranks": 2, "microbatches": 2},
            ScheduleNameError,
            "unknown schedule '1F2B'; did you mean 1F1B? known are ForwardOnly, GPipe, 1F1B, "
            "Interleaved1F1B, LoopedBFS, ZB-H1, ZB-H2, InterleavedZeroBubble, ZBV, V-Half, "
            "V-Min, DualPipeV, DualPipe",
        ),
    ],
)
def test_size_or_name_that_cannot_be_built_is_refused(
    family: str, sizes: dict[str, Any], error: type[ValueError], message: str
) -> None:
    with pytest.raises(error) as caught:
        build(family, **sizes)
    assert str(caught.value) == message


def test_lowering_is_a_list_of_passes() -> None:
    schedule = build("Interleaved1F1B", ranks=2, microbatches=4)
    costs = Costs(forward=[1, 2, 3, 4], transfer=0.5)
    prepared = add_reduce_grad(add_unshard_reshard(schedule, whole_stages=3))
    assert lower(schedule) == add_send_recv(prepared)
    assert lower(schedule, receives="late") == delay_receives(add_send_recv(prepared))
    assert lower(schedule, receives=costs) == add_send_recv_by_cost(prepared, costs)
    fewer = add_reduce_grad(add_unshard_reshard(schedule, whole_stages=1))
    assert lower(schedule, whole_stages=1) == add_send_recv(fewer)


def test_lowered_schedule_holds_all_that_a_runtime_needs() -> None:
    expected = """
        0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD
        1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD
    """
    assert orders_of(lower(build("1F1B", ranks=2, microbatches=2))) == read_orders(expected)


def test_unknown_place_for_receives_is_refused() -> None:
    with pytest.raises(ValueError, match="receives") as caught:
        lower(build("1F1B", ranks=2, microbatches=2), receives="never")  # type: ignore[arg-type]  # wrong on purpose
    assert str(caught.value) == "receives must be 'early', 'late' or Costs (got 'never')"


def test_schedule_is_lowered_only_once() -> None:
    with pytest.raises(ScheduleError) as caught:
        lower(lower(build("1F1B", ranks=2, microbatches=2)))
    message = "the schedule already has sends and receives; lower it only once"
    assert str(caught.value) == message


def takes_too_little(ranks: int, microbatches: int) -> Schedule:
    return build("1F1B", ranks=ranks, microbatches=microbatches)


def returns_nothing(ranks: int, microbatches: int, stages_per_rank: int) -> None:
    build("1F1B", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            takes_too_little,
            "a schedule function must take ranks, microbatches and stages_per_rank by position "
            "(got takes_too_little(ranks: int, microbatches: int) -> "
            "penstock.ir.schedule.Schedule); define it as takes_too_little(ranks, microbatches, "
            "stages_per_rank)",
        ),
        (
            returns_nothing,
            "a schedule function must return a Schedule (returns_nothing returned NoneType); end "
            "it with return Schedule.from_orders(...)",
        ),
        (7, "family must be a name or a function that returns a Schedule (got int)"),
    ],
)
def test_schedule_function_of_another_form_is_refused(given: Any, message: str) -> None:
    # Python's own TypeError or an AttributeError of NoneType said nothing of what was wrong.
    with pytest.raises(ArgumentError) as caught:
        build(given, ranks=2, microbatches=2)
    assert str(caught.value) == message
