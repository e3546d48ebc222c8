"""What the ranks of one pipeline must have in common, and how a difference is described."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import torch

from penstock.ir.schedule import Schedule
from penstock.loss.reduction import Reduction
from penstock.ranks.agreement import NOTHING, Fact, digest_of, group_ranks, plain_fact
from penstock.splitting.signature import Signature
from penstock.training.options import RunOptions
from penstock.version import own_version

__all__ = ["RankFacts", "model_fact", "schedule_fact", "version_facts"]

# How many parameters that differ an error names.
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Settings of a pipeline, beside model and schedule, that must be the same on every rank.

    Of the `options`, those that ranks may not differ in.
    """

    has_loss: bool
    reduction: Reduction
    ties: Sequence[Sequence[str]]
    seed: int | None
    options: RunOptions

    def facts(self) -> list[Fact]:
        """Return one fact per setting; functions are not compared."""
        reduction = self.reduction if isinstance(self.reduction, str) else "by a function"
        options = self.options
        return [
            plain_fact("loss", "given" if self.has_loss else None),
            plain_fact("reduction", reduction),
            plain_fact("ties", [list(names) for names in self.ties]),
            plain_fact("cuda_graphs", options.cuda_graphs),
            plain_fact("seed", self.seed),
            plain_fact("compare_data", options.compare_data),
            plain_fact("transport", options.transport),
            plain_fact("find_turning_points", options.find_turning_points),
        ]


def version_facts(*, torch_version: str = torch.__version__) -> list[Fact]:
    """Return what runs here; the last number of Python's version makes no difference."""
    return [
        plain_fact("penstock", own_version()),
        plain_fact("torch", torch_version),
        plain_fact("Python", f"{sys.version_info.major}.{sys.version_info.minor}"),
    ]


def schedule_fact(schedule: Schedule) -> Fact:
    """Return a fact of the order of every rank, with its placement and dataflow."""
    digest = blake2b(repr((schedule.placement, schedule.dataflow)).encode(), digest_size=16)
    for column in (schedule.rows.first, *schedule.rows.columns):
        digest.update(column.tobytes())
    return Fact(
        "schedule", digest.digest(), lambda: _describe_schedule(schedule), _explain_schedules
    )


def _describe_schedule(schedule: Schedule) -> dict[str, Any]:
    flow = schedule.dataflow
    return {
        "schedule": f"{schedule.name} for {schedule.num_stages} stages on {schedule.num_ranks} "
        f"ranks, {schedule.microbatches} microbatches",
        "placement": list(schedule.placement.rank_of_stage),
        "dataflow": [list(flow.edges), list(flow.parts)],
        "orders": [[str(work) for work in order] for order in schedule.orders],
    }


def _explain_schedules(by_rank: Mapping[int, Any]) -> str:
    """Say how schedules differ: in name or sizes, placement, dataflow, or the first action."""
    for key in ("schedule", "placement", "dataflow"):
        values = {rank: str(schedule[key]) for rank, schedule in by_rank.items()}
        if len(set(values.values())) > 1:
            return group_ranks(values, key)
    for rank in range(len(next(iter(by_rank.values()))["orders"])):
        orders = [schedule["orders"][rank] for schedule in by_rank.values()]
        for position, works in enumerate(zip_longest(*orders, fillvalue="nothing")):
            if len(set(works)) > 1:
                where = f"at position {position} of rank {rank} in the schedule, "
                return where + group_ranks(dict(zip(by_rank, works, strict=True)))
    raise AssertionError("schedules with different digests are different")


def model_fact(stage: int, signature: Signature | None) -> Fact:
    """Return a fact of what a stage holds, if that is known here."""

    def explain(by_rank: Mapping[int, Any]) -> str:
        return _explain_signatures(stage, by_rank)

    name = f"stage {stage}"
    if signature is None:
        return Fact(name, NOTHING, None, explain)
    return Fact(name, digest_of(json.dumps(signature).encode()), lambda: signature, explain)


def _explain_signatures(stage: int, by_rank: Mapping[int, Any]) -> str:
    held = {rank: dict(signature) for rank, signature in by_rank.items()}
    differing = {
        name: {rank: own.get(name, "nothing of that name") for rank, own in held.items()}
        for name in dict.fromkeys(name for own in held.values() for name in own)
    }
    different = {n: values for n, values in differing.items() if len(set(values.values())) > 1}
    if not different:
        return f"stage {stage} has its parameters in different orders"
    lines = [f"of {n!r} {group_ranks(different[n])}" for n in list(different)[:_MOST_NAMED]]
    if len(different) > _MOST_NAMED:
        lines.append(f"and {len(different) - _MOST_NAMED} more differ")
    return f"in stage {stage}, {'; '.join(lines)}"
