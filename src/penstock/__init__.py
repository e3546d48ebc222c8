"""Penstock: plan, run and see pipeline-parallel training on PyTorch."""

from importlib import import_module
from sys import modules
from typing import TYPE_CHECKING, Any

from penstock.assembly import build, lower
from penstock.checks.problem import Problem
from penstock.checks.report import check, find_problems
from penstock.costs import Costs
from penstock.errors import (
    ArgumentError,
    BatchError,
    BoundaryError,
    CheckpointError,
    CostsError,
    DeadlockError,
    MemoryLimitError,
    MissingDependencyError,
    ModelError,
    ParseError,
    PeerLostError,
    PenstockError,
    PipelineError,
    PlanError,
    ScheduleError,
    ScheduleNameError,
    SizeError,
)
from penstock.ir.actions import Action, Kind, Overlap
from penstock.ir.dataflow import Dataflow, Routed
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.ir.text import parse_work
from penstock.passes.backward import merge_backward, split_backward
from penstock.passes.overlap import overlap_forward_backward
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.passes.reroute import reroute
from penstock.passes.send_recv import add_send_recv, add_send_recv_by_cost, delay_receives
from penstock.passes.shard import add_unshard_reshard
from penstock.passes.thin import thin_out
from penstock.planner.in_flight import count_in_flight
from penstock.planner.partition import Partition, partition
from penstock.planner.pieces import Piece
from penstock.schedules.registry import register
from penstock.sim.engine import simulate
from penstock.sim.explain import Explanation, Gap, Saving, explain
from penstock.sim.timeline import Span, Timeline

if TYPE_CHECKING:
    from penstock.dropin import (
        PipelineStage,
        Schedule1F1B,
        ScheduleDualPipeV,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleZBVZeroBubble,
        build_stage,
        pipeline,
    )
    from penstock.dropin.schedules import get_schedule_class
    from penstock.planner.choices import Choices
    from penstock.planner.choosing.findings import Finding, Findings
    from penstock.planner.planning import plan
    from penstock.planner.plans import Plan
    from penstock.planner.revision import revise
    from penstock.planner.searching import search
    from penstock.runtime.disturbed import Disturbance, Drop
    from penstock.runtime.losses import add_loss
    from penstock.runtime.microbatch import Along, Ready, Shared
    from penstock.runtime.watch import Watch
    from penstock.sim.hindsight import review
    from penstock.sim.timeline_file import read_timeline, write_timeline
    from penstock.sim.trace_reading import read_trace
    from penstock.splitting.by_layers.hooks import here_only
    from penstock.splitting.doors import split
    from penstock.splitting.marks import SplitPoint, pipe_split
    from penstock.splitting.output_loss import find_loss
    from penstock.splitting.pipe import Pipe
    from penstock.training.balance import balance
    from penstock.training.checkpoint import Checkpoints, Restored
    from penstock.training.elastic import ElasticStep, Job, train_elastically
    from penstock.training.layer_costs import measure_layers
    from penstock.training.links import measure_links
    from penstock.training.measuring import measure, measure_closely
    from penstock.training.pipeline import Pipeline, StepResult
    from penstock.view.trace import write_trace

# The planner, and what needs torch, are loaded when they are first asked for.
_LATE_NAMES = {
    "Along": "penstock.runtime.microbatch",
    "Checkpoints": "penstock.training.checkpoint",
    "Choices": "penstock.planner.choices",
    "Disturbance": "penstock.runtime.disturbed",
    "Drop": "penstock.runtime.disturbed",
    "ElasticStep": "penstock.training.elastic",
    "Finding": "penstock.planner.choosing.findings",
    "Findings": "penstock.planner.choosing.findings",
    "Job": "penstock.training.elastic",
    "Pipe": "penstock.splitting.pipe",
    "Pipeline": "penstock.training.pipeline",
    "PipelineStage": "penstock.dropin",
    "Plan": "penstock.planner.plans",
    "Ready": "penstock.runtime.microbatch",
    "Restored": "penstock.training.checkpoint",
    "Schedule1F1B": "penstock.dropin",
    "ScheduleDualPipeV": "penstock.dropin",
    "ScheduleGPipe": "penstock.dropin",
    "ScheduleInterleaved1F1B": "penstock.dropin",
    "ScheduleInterleavedZeroBubble": "penstock.dropin",
    "ScheduleLoopedBFS": "penstock.dropin",
    "ScheduleZBVZeroBubble": "penstock.dropin",
    "Shared": "penstock.runtime.microbatch",
    "SplitPoint": "penstock.splitting.marks",
    "StepResult": "penstock.training.pipeline",
    "Watch": "penstock.runtime.watch",
    "add_loss": "penstock.runtime.losses",
    "balance": "penstock.training.balance",
    "build_stage": "penstock.dropin",
    "find_loss": "penstock.splitting.output_loss",
    "get_schedule_class": "penstock.dropin.schedules",
    "here_only": "penstock.splitting.by_layers.hooks",
    "measure": "penstock.training.measuring",
    "measure_closely": "penstock.training.measuring",
    "measure_layers": "penstock.training.layer_costs",
    "measure_links": "penstock.training.links",
    "pipe_split": "penstock.splitting.marks",
    "pipeline": "penstock.dropin",
    "plan": "penstock.planner.planning",
    "read_timeline": "penstock.sim.timeline_file",
    "read_trace": "penstock.sim.trace_reading",
    "review": "penstock.sim.hindsight",
    "revise": "penstock.planner.revision",
    "search": "penstock.planner.searching",
    "split": "penstock.splitting.doors",
    "train_elastically": "penstock.training.elastic",
    "write_timeline": "penstock.sim.timeline_file",
    "write_trace": "penstock.view.trace",
}

__all__ = [
    "Action",
    "Along",
    "ArgumentError",
    "BatchError",
    "BoundaryError",
    "CheckpointError",
    "Checkpoints",
    "Choices",
    "Costs",
    "CostsError",
    "Dataflow",
    "DeadlockError",
    "Disturbance",
    "Drop",
    "ElasticStep",
    "Explanation",
    "Finding",
    "Findings",
    "Gap",
    "Job",
    "Kind",
    "MemoryLimitError",
    "MissingDependencyError",
    "ModelError",
    "Overlap",
    "ParseError",
    "Partition",
    "PeerLostError",
    "PenstockError",
    "Piece",
    "Pipe",
    "Pipeline",
    "PipelineError",
    "PipelineStage",
    "Placement",
    "Plan",
    "PlanError",
    "Problem",
    "Ready",
    "Restored",
    "Routed",
    "Saving",
    "Schedule",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleError",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleNameError",
    "ScheduleZBVZeroBubble",
    "Shared",
    "SizeError",
    "Span",
    "SplitPoint",
    "StepResult",
    "Timeline",
    "Watch",
    "add_loss",
    "add_reduce_grad",
    "add_send_recv",
    "add_send_recv_by_cost",
    "add_unshard_reshard",
    "balance",
    "build",
    "build_stage",
    "check",
    "count_in_flight",
    "delay_receives",
    "explain",
    "find_loss",
    "find_problems",
    "get_schedule_class",
    "here_only",
    "lower",
    "measure",
    "measure_closely",
    "measure_layers",
    "measure_links",
    "merge_backward",
    "overlap_forward_backward",
    "parse_work",
    "partition",
    "pipe_split",
    "pipeline",
    "plan",
    "read_timeline",
    "read_trace",
    "register",
    "reroute",
    "review",
    "revise",
    "search",
    "simulate",
    "split",
    "split_backward",
    "thin_out",
    "train_elastically",
    "write_timeline",
    "write_trace",
]

if "IPython" in modules:
    from penstock.view.notebook import join_notebook

    join_notebook()


def __getattr__(name: str) -> Any:
    if name in _LATE_NAMES:
        return getattr(import_module(_LATE_NAMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
