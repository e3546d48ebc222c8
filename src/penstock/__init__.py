"""Penstock: plan, run and see pipeline-parallel training on PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.assembly import build, lower
from penstock.checks.problem import Problem
from penstock.checks.report import check, find_problems
from penstock.costs import Costs
from penstock.errors import (
    ArgumentError,
    BatchError,
    BoundaryError,
    CostsError,
    DeadlockError,
    MissingDependencyError,
    ModelError,
    ParseError,
    PenstockError,
    PipelineError,
    ScheduleError,
    ScheduleNameError,
    SizeError,
)
from penstock.ir.actions import Action, Kind, Overlap
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.ir.text import parse_work
from penstock.passes.backward import merge_backward, split_backward
from penstock.passes.overlap import overlap_forward_backward
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.passes.send_recv import add_send_recv, add_send_recv_by_cost, delay_receives
from penstock.passes.shard import add_unshard_reshard
from penstock.passes.thin import thin_out
from penstock.schedules.registry import register
from penstock.sim.engine import simulate
from penstock.sim.explain import Explanation, Gap, Saving, explain
from penstock.sim.timeline import Span, Timeline

if TYPE_CHECKING:
    from penstock.runtime.losses import add_loss
    from penstock.runtime.microbatch import Along, Ready, Shared
    from penstock.training.pipeline import Pipeline, StepResult

# What needs torch is loaded when it is first asked for.
_TORCH_NAMES = {
    "Along": "penstock.runtime.microbatch",
    "Pipeline": "penstock.training.pipeline",
    "Ready": "penstock.runtime.microbatch",
    "Shared": "penstock.runtime.microbatch",
    "StepResult": "penstock.training.pipeline",
    "add_loss": "penstock.runtime.losses",
}

__all__ = [
    "Action",
    "Along",
    "ArgumentError",
    "BatchError",
    "BoundaryError",
    "Costs",
    "CostsError",
    "Dataflow",
    "DeadlockError",
    "Explanation",
    "Gap",
    "Kind",
    "MissingDependencyError",
    "ModelError",
    "Overlap",
    "ParseError",
    "PenstockError",
    "Pipeline",
    "PipelineError",
    "Placement",
    "Problem",
    "Ready",
    "Saving",
    "Schedule",
    "ScheduleError",
    "ScheduleNameError",
    "Shared",
    "SizeError",
    "Span",
    "StepResult",
    "Timeline",
    "add_loss",
    "add_reduce_grad",
    "add_send_recv",
    "add_send_recv_by_cost",
    "add_unshard_reshard",
    "build",
    "check",
    "delay_receives",
    "explain",
    "find_problems",
    "lower",
    "merge_backward",
    "overlap_forward_backward",
    "parse_work",
    "register",
    "simulate",
    "split_backward",
    "thin_out",
]


def __getattr__(name: str) -> Any:
    if name in _TORCH_NAMES:
        return getattr(import_module(_TORCH_NAMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
