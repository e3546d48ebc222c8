"""Torch's own orders and passes, as an oracle; the two sides meet as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.assembly import build
from penstock.dropin.names.actions import _Action
from penstock.dropin.names.lists import Order

__all__ = [
    "FAMILIES",
    "Texts",
    "compute_order",
    "needs",
    "pipelining",
    "rank_of_stage",
    "read_order",
    "texts",
    "to_torch",
    "torch_order",
]

pipelining: Any = pytest.importorskip("torch.distributed.pipelining.schedules")

Texts = dict[int, list[str]]


def needs(name: str) -> pytest.MarkDecorator:
    """Skip tests of something that not every version of torch has."""
    return pytest.mark.skipif(not hasattr(pipelining, name), reason=f"this torch has no {name}")


# Name and stages per rank.
FAMILIES = [
    ("GPipe", 1),
    ("1F1B", 1),
    *[
        (name, stages_per_rank)
        for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
        for stages_per_rank in (1, 2, 3)
    ],
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]


@dataclass
class StandInStage:
    """What torch's constructors read of a stage when they only compute the order."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def torch_order(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Texts | None:
    """Return every rank's order from torch, or None where torch refuses the size."""
    stage = StandInStage(ranks * stages_per_rank, ranks)
    schedule_class = pipelining.get_schedule_class(name)
    try:
        if issubclass(schedule_class, pipelining.PipelineScheduleSingle):
            schedule = schedule_class(stage, microbatches)
        else:
            # Without the lowering that follows: it is quadratic, and not compared here.
            skip = {"_prepare_schedule_with_comms": lambda _self, _actions, **_options: None}
            planner = type(schedule_class.__name__, (schedule_class,), skip)
            schedule = planner([stage] * stages_per_rank, microbatches)
    except ValueError:
        return None
    return texts(schedule.pipeline_order)


def texts(order: Mapping[int, Sequence[object]]) -> Texts:
    """Return an order as text, idle slots as "None"."""
    return {rank: [str(action) for action in actions] for rank, actions in order.items()}


def to_torch(order: Mapping[int, Sequence[_Action | None]]) -> dict[int, list[Any]]:
    """Fresh lists of torch's actions; its functions consume what they are given."""
    return {
        rank: [
            None if action is None else pipelining._Action.from_str(str(action))
            for action in slots
        ]
        for rank, slots in order.items()
    }


def read_order(*lines: str) -> Order:
    """Read an order from a line of text per rank; a dot is idle, brackets make an overlap."""
    return {
        rank: [
            _Action.from_str(cell.replace(")", ")OVERLAP_F_B").strip(".")) for cell in line.split()
        ]
        for rank, line in enumerate(lines)
    }


def compute_order(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Order:
    """Return the compute actions of a family, without idle slots, for any size that we have."""
    schedule = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return {
        rank: [_Action.from_str(str(work)) for work in order]
        for rank, order in enumerate(schedule.orders)
    }


def rank_of_stage(order: Order) -> dict[int, int]:
    """Return the rank that each stage runs on."""
    holder = {}
    for rank, slots in order.items():
        for action in slots:
            for member in (action.sub_actions or (action,)) if action is not None else ():
                holder[member.stage_index] = rank
    return holder
