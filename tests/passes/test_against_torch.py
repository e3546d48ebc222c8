"""Lowered schedules, compared with what torch makes of the same orders of a chain."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import pytest

from penstock.assembly import build, lower
from penstock.ir.schedule import Schedule
from penstock.passes.backward import merge_backward, split_backward
from penstock.passes.shard import add_unshard_reshard
from tests.tables import Orders, orders_of

torch_schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")

FAMILIES = [
    ("GPipe", 1),
    ("1F1B", 1),
    *[
        (name, stages_per_rank)
        for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
        for stages_per_rank in (1, 2, 3)
    ],
    ("ZBV", 2),
    ("DualPipeV", 2),
]


def to_torch(orders: Orders) -> dict[int, list[Any]]:
    """Fresh lists of torch's actions; its functions consume what they are given."""
    read = torch_schedules._Action.from_str
    return {rank: [read(text) for text in order] for rank, order in enumerate(orders)}


def from_torch(actions: dict[int, list[Any]]) -> Orders:
    return [[str(action) for action in actions[rank]] for rank in range(len(actions))]


def lower_with_torch(schedule: Schedule) -> Orders:
    """Run the steps of `_PipelineScheduleRuntime._prepare_schedule_with_comms`."""
    actions = {
        rank: torch_schedules._add_reduce_grad(
            torch_schedules._add_unshard_reshard(order), schedule.microbatches
        )
        for rank, order in to_torch(orders_of(schedule)).items()
    }
    return from_torch(
        torch_schedules._add_send_recv(
            actions,
            stage_to_rank=schedule.placement.rank_of_stage.__getitem__,
            num_stages=schedule.num_stages,
        )
    )


def with_reshards_sorted(orders: Orders) -> Orders:
    """RESHARDs side by side in rising order: torch takes them from a set, which has no order."""

    def sort_runs(order: Iterable[str]) -> list[str]:
        runs = groupby(order, key=lambda text: text.endswith("RESHARD"))
        return [t for is_reshard, run in runs for t in (sorted(run) if is_reshard else run)]

    return [sort_runs(order) for order in orders]


def assert_lowered_alike(schedule: Schedule) -> None:
    expected = with_reshards_sorted(lower_with_torch(schedule))
    assert with_reshards_sorted(orders_of(lower(schedule))) == expected


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_lowered_orders_are_those_of_torch(name: str, stages_per_rank: int, ranks: int) -> None:
    for microbatches in (1, 2, 5):
        assert_lowered_alike(
            build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_lowered_orders_are_those_of_torch_for_every_number_of_microbatches(
    name: str, stages_per_rank: int, ranks: int
) -> None:
    for microbatches in range(1, 17):
        assert_lowered_alike(
            build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        )


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("stages_per_rank", [4, 6])
def test_stages_are_gathered_and_let_go_as_torch_does_it(stages_per_rank: int, limit: int) -> None:
    for name in ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"):
        schedule = build(name, ranks=2, microbatches=4, stages_per_rank=stages_per_rank)
        torch_orders = {
            rank: torch_schedules._add_unshard_reshard(order, limit)
            for rank, order in to_torch(orders_of(schedule)).items()
        }
        ours = orders_of(add_unshard_reshard(schedule, whole_stages=limit))
        assert with_reshards_sorted(ours) == with_reshards_sorted(from_torch(torch_orders))


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBV", "ZB-H1", "V-Half", "1F1B"])
def test_backwards_are_merged_as_torch_does_it(name: str) -> None:
    for schedule in (
        build(name, ranks=4, microbatches=6),
        split_backward(build(name, ranks=4, microbatches=6)),
    ):
        merged = {
            rank: torch_schedules._merge_bw(order)
            for rank, order in to_torch(orders_of(schedule)).items()
        }
        assert orders_of(merge_backward(schedule)) == from_torch(merged)
