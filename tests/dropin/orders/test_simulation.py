import json
from pathlib import Path

import pytest

from penstock.dropin.names.lists import list_actions
from penstock.dropin.names.passes import _add_send_recv, _defer_recv_ops, lower_order
from penstock.dropin.orders.slots import (
    _dump_chrometrace,
    _format_pipeline_order,
    _simulate_comms_compute,
)
from penstock.dropin.orders.tables import build_order
from penstock.errors import DeadlockError, ScheduleError
from tests.covering import all_but_slow
from tests.dropin.incumbent import (
    FAMILIES,
    compute_order,
    pipelining,
    rank_of_stage,
    read_order,
    texts,
    to_torch,
)


@pytest.mark.parametrize("ranks", all_but_slow([1, 2, 3, 5], [1, 3]))
@pytest.mark.parametrize(("name", "stages_per_rank"), [f for f in FAMILIES if f[0] != "DualPipeV"])
def test_every_action_is_in_the_slot_where_torch_puts_it(
    name: str, stages_per_rank: int, ranks: int
) -> None:
    for microbatches in (1, 2, 7):
        order = compute_order(name, ranks, microbatches, stages_per_rank)
        holder = rank_of_stage(order)
        sizes = (holder.__getitem__, len(holder))
        early = _add_send_recv(order, *sizes)
        for lowered in (early, _defer_recv_ops(early, holder.__getitem__)):
            expected = pipelining._simulate_comms_compute(to_torch(dict(lowered)), *sizes)
            found = _simulate_comms_compute(
                lowered, stage_to_rank=holder.__getitem__, num_stages=len(holder)
            )
            assert texts(found) == texts(expected)


@pytest.mark.parametrize("ranks", all_but_slow([1, 2, 3, 5], [1, 3]))
@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_whole_lowered_schedules_run_too(name: str, stages_per_rank: int, ranks: int) -> None:
    """Torch refuses UNSHARD, RESHARD, REDUCE_GRAD and overlaps, that is all that it lowers."""
    order = compute_order(name, ranks, 6, stages_per_rank)
    holder = rank_of_stage(order)
    lowered = list_actions(lower_order(order, holder, 6))
    with pytest.raises(ValueError, match="Unsupported action type"):
        pipelining._simulate_comms_compute(
            to_torch(dict(lowered)), holder.__getitem__, len(holder)
        )
    found = _simulate_comms_compute(lowered, holder.__getitem__, len(holder))
    for rank, slots in found.items():
        assert [action for action in slots if action is not None] == lowered[rank]
        assert slots[-1] is not None


def test_idle_slots_in_the_order_are_not_time() -> None:
    order = read_order("0F0 . . 0SEND_F0 0RECV_B0 0B0", ". 1RECV_F0 1F0 1B0 . 1SEND_B0")
    assert _simulate_comms_compute(order, (0, 1).__getitem__, 2) == read_order(
        "0F0 0SEND_F0  .   .      0RECV_B0 0B0",
        " .  1RECV_F0 1F0 1B0     1SEND_B0",
    )


def test_order_without_messages_takes_its_values_from_the_slot_before() -> None:
    """Accept what torch refuses because it looks for messages."""
    order = read_order("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert _simulate_comms_compute(order, (0, 1).__getitem__, 2) == read_order(
        "0F0 0F1  .  0B0  .  0B1",
        " .  1F0 1B0 1F1 1B1",
    )


def test_deadlock_names_who_waits_for_whom() -> None:
    order = read_order(
        "0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    with pytest.raises(DeadlockError) as caught:
        _simulate_comms_compute(order, (0, 1).__getitem__, 2)
    assert str(caught.value) == (
        "the order never finishes; 0RECV_B0 waits for 1SEND_B0, 1RECV_F1 waits for 0SEND_F1"
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("0F0 0SEND_F0", "1F0"), "rank 1, position 0, 1F0: what it waits for is not in the"),
        (("0F0", "1RECV_F0 1F0"), "rank 1, position 0, 1RECV_F0: nobody sends what it receives"),
        (("0F0 0SEND_F0", "1F0 1RECV_F0"), "1F0 waits for 1RECV_F0"),
        (("0SEND_F0 0F0", "1RECV_F0 1F0"), "0SEND_F0 waits for 0F0"),
    ],
)
def test_missing_and_misplaced_messages_are_reported(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        _simulate_comms_compute(read_order(*lines), (0, 1).__getitem__, 2)


def test_table_is_that_of_torch() -> None:
    for name, stages_per_rank in FAMILIES:
        for ranks, microbatches in ((1, 1), (2, 4), (4, 8), (3, 14)):
            order = build_order(name, ranks, 2 * microbatches, stages_per_rank)
            for error_step in (None, 0, 3, 10):
                expected = pipelining._format_pipeline_order(to_torch(order), error_step)
                assert _format_pipeline_order(order, error_step) == expected


def test_table_may_have_more_ranks_than_steps_and_wide_rank_numbers() -> None:
    """Torch fails on the first, and shifts the head of the second."""
    order = read_order(*[f"{rank}F0" for rank in range(11)])
    head, step = _format_pipeline_order(order, error_step_number=0).splitlines()
    assert head.split("Rank")[-2:] == [" 9 ", " 10"]
    assert step.endswith("9F0    10F0    <-- ERROR HERE")
    assert head.index("Rank 10") == step.index("10F0")


def test_trace_is_that_of_torch_but_counts_every_computation_as_one(tmp_path: Path) -> None:
    order = read_order("0UNSHARD 0F0 0SEND_F0 . 0I0 0W0", ". 1RECV_F0 1F0 (1F1;1B0) 1REDUCE_GRAD")
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    _dump_chrometrace(order, str(ours))
    pipelining._dump_chrometrace(to_torch(order), str(theirs))
    expected = json.loads(theirs.read_text())
    for event in expected["traceEvents"]:
        if event["name"] in ("0I0", "(1F1;1B0)OVERLAP_F_B"):
            event["cat"] = "computation"
    assert json.loads(ours.read_text()) == expected
