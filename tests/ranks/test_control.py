"""Plain values between ranks, and work that all ranks do or none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.ranks.control import (
    GroupControl,
    LocalControl,
    cannot,
    open_control,
)
from penstock.ranks.tree.values import decode_value, encode_value
from tests.processes import Processes


def open_group() -> GroupControl:
    control = open_control()
    assert isinstance(control, GroupControl)
    return control


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the whole text is compared
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


# ---- values


def gather_of_different_length(rank: int) -> list[object]:
    return open_group().gather({"rank": rank, "text": "ü" * 100 * rank, "none": None})


def test_values_of_different_length_reach_every_rank_in_order(four_processes: Processes) -> None:
    expected = [{"rank": rank, "text": "ü" * 100 * rank, "none": None} for rank in range(4)]
    assert four_processes.run(gather_of_different_length, seconds=300) == [expected] * 4


def collect_and_scatter(rank: int) -> list[object]:
    control = open_group()
    collected = control.collect({"from": rank})
    shares = [f"for {peer}" for peer in range(4)] if rank == 0 else []
    return [collected, control.scatter(shares), control.broadcast([rank, "x" * 1000])[0]]


def test_first_rank_collects_and_every_rank_gets_its_share(four_processes: Processes) -> None:
    everything = [{"from": rank} for rank in range(4)]
    assert four_processes.run(collect_and_scatter, seconds=300) == [
        [everything if rank == 0 else [], f"for {rank}", 0] for rank in range(4)
    ]


def gather_what_is_not_plain(rank: int) -> list[object]:
    control = open_group()
    error = error_of(lambda: control.gather({1, 2} if rank == 1 else "plain"))
    # The channel is in order afterwards.
    return [error, control.gather(rank)]


def test_value_that_is_not_plain_is_refused_by_every_rank(two_processes: Processes) -> None:
    # A rank that raised by itself would have left the others waiting for its value.
    error = (
        "PipelineError: a value between ranks must be plain data of at most 268,435,456 bytes "
        "(rank 1 has not plain data)"
    )
    assert two_processes.run(gather_what_is_not_plain, seconds=300) == [[error, [0, 1]]] * 2


def test_one_process_gathers_its_own_value() -> None:
    control = open_control()
    assert isinstance(control, LocalControl)
    assert control.gather([1, 2.5, "x", (3,)]) == [[1, 2.5, "x", [3]]]
    assert control.collect("mine") == ["mine"]
    assert control.scatter(["mine"]) == "mine"


@pytest.mark.parametrize("data", [b"x", b"\xff", b"[" * 100_000, b""])
def test_bytes_that_are_not_a_plain_value_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a plain value"):
        decode_value(data)


def test_value_is_one_line() -> None:
    assert encode_value(["a\nb", None]) == b'["a\\nb", null]'


# ---- work


def fail_on_some(rank: int) -> list[str]:
    control = open_group()

    def work(failing: tuple[int, ...]) -> None:
        with control.together(cannot("find room")):
            if rank in failing:
                raise ValueError(f"rank {rank} is full")

    work(())
    return [error_of(lambda: work((1,))), error_of(lambda: work((2, 3)))]


def test_what_fails_on_one_rank_fails_on_all_and_the_first_one_is_named(
    four_processes: Processes,
) -> None:
    one = "PipelineError: rank 1 cannot find room: ValueError: rank 1 is full"
    two = "PipelineError: rank 2 cannot find room: ValueError: rank 2 is full"
    assert four_processes.run(fail_on_some, seconds=300) == [
        [one, two],
        ["ValueError: rank 1 is full", two],
        [one, "ValueError: rank 2 is full"],
        [one, "ValueError: rank 3 is full"],
    ]


def wait_in_vain(rank: int) -> str:
    control = open_group()
    control.gather(rank)
    if rank == 0:
        control.abort()
    return error_of(lambda: control.gather(rank)).partition(": ")[0]


def test_aborted_control_ends_the_wait_of_every_rank(two_processes: Processes) -> None:
    assert two_processes.run(wait_in_vain, seconds=300) == ["LinkLostError"] * 2


# ---- cost


def count_collectives(_: int) -> list[int]:
    count = 0
    gather = GroupControl.gather_bytes

    def counting(control: GroupControl, data: bytes) -> list[bytes]:
        nonlocal count
        count += 1
        return gather(control, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupControl, "gather_bytes", counting)
        stages = [torch.nn.Linear(4, 4) for _ in range(2)]
        settings: dict[str, Any] = {"microbatches": 2, "loss": mse_loss}
        pipeline = ps.Pipeline(stages, "1F1B", group=dist.group.WORLD, **settings)
        counts = []
        for _ in range(5):
            count = 0
            pipeline.step(torch.ones(4, 4), target=torch.ones(4, 4))
            counts.append(count)
        count = 0
        pipeline.clip_grad_norm_(1.0)
    return [*counts, count]


def test_step_with_known_shapes_has_two_collectives(two_processes: Processes) -> None:
    # One to agree on the batch and one for the outcome; the first steps compare more.
    expected = [4, 3, 3, 2, 2, 1]
    assert two_processes.run(count_collectives, seconds=300) == [expected] * 2
