"""The orders of the families that torch has too, compared with torch's own tables."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.schedules.registry import find_family
from tests.covering import all_but_slow

torch_schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")

Table = list[list[str]]


@dataclass
class StandInStage:
    """What torch's constructors read of a stage when they only compute the table."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def torch_table(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Table | None:
    """Return every rank's order as torch computes it, or None where torch refuses the size."""
    stage = StandInStage(ranks * stages_per_rank, ranks)
    schedule_class: Any = torch_schedules.get_schedule_class(name)
    try:
        if issubclass(schedule_class, torch_schedules.PipelineScheduleSingle):
            schedule = schedule_class(stage, microbatches)
        else:
            schedule = without_lowering(schedule_class)([stage] * stages_per_rank, microbatches)
    except ValueError:
        return None
    return [compute_texts(schedule.pipeline_order[rank]) for rank in range(ranks)]


def without_lowering(schedule_class: Any) -> Any:
    """Return the class without its lowering, which is quadratic and not compared."""
    skip = {"_prepare_schedule_with_comms": lambda _self, _actions, **_options: None}
    return type(schedule_class.__name__, (schedule_class,), skip)


def compute_texts(actions: list[Any]) -> list[str]:
    """Return the compute actions as text, without idle slots and gradient reductions."""
    return [str(action) for action in actions if action is not None and action.is_compute_op]


def our_table(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Table:
    schedule = find_family(name).generate(ranks, microbatches, stages_per_rank)
    return [[str(work) for work in order] for order in schedule.orders]


@pytest.mark.parametrize("ranks", all_but_slow(range(1, 9), (1, 2, 3, 4, 8)))
@pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [
        ("GPipe", 1),
        ("Interleaved1F1B", 1),
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 3),
        ("LoopedBFS", 1),
        ("LoopedBFS", 2),
        ("LoopedBFS", 3),
        ("InterleavedZeroBubble", 1),
        ("InterleavedZeroBubble", 2),
        ("InterleavedZeroBubble", 3),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
def test_order_is_the_one_of_torch_wherever_torch_has_one(
    name: str, stages_per_rank: int, ranks: int
) -> None:
    expected = {
        microbatches: torch_table(name, ranks, microbatches, stages_per_rank)
        for microbatches in range(1, 17)
    }
    known = {size: table for size, table in expected.items() if table is not None}
    assert known
    assert known == {size: our_table(name, ranks, size, stages_per_rank) for size in known}
