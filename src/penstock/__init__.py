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
from penstock.planner.partition.partition import Partition, partition
from penstock.planner.partition.pieces import Piece
from penstock.planner.search.in_flight import count_in_flight
from penstock.schedules.registry import register
from penstock.sim.engine import simulate
from penstock.sim.explain import Explanation, Gap, Saving, explain
from penstock.sim.timeline import Span, Timeline

if TYPE_CHECKING:
    from penstock.alive.timeouts import Timeouts
    from penstock.checkpoint.checkpoints import Checkpoints, Restored
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
    from penstock.elastic import ElasticStep, Job, train_elastically
    from penstock.files.timeline import read_timeline, write_timeline
    from penstock.files.trace.reading import read_trace
    from penstock.loss.added import add_loss
    from penstock.measuring.balance import balance
    from penstock.measuring.layers import measure_layers
    from penstock.measuring.links import measure_links
    from penstock.measuring.stages import measure, measure_closely
    from penstock.planner.planning import plan
    from penstock.planner.plans import Plan
    from penstock.planner.revision import revise
    from penstock.planner.search.choices import Choices
    from penstock.planner.search.findings import Finding, Findings
    from penstock.planner.search.search import search
    from penstock.ranks.fault_injection import Drop, FaultInjection
    from penstock.sim.review import review
    from penstock.splitting.by_layers.hooks.hooks import here_only
    from penstock.splitting.marks import SplitPoint, pipe_split
    from penstock.splitting.output_loss import find_loss
    from penstock.splitting.pipe import Pipe
    from penstock.splitting.splitter import split
    from penstock.step.microbatches import Along, Ready, Shared
    from penstock.training.pipeline import Pipeline, StepResult
    from penstock.view.trace import write_trace

# The planner, and what needs torch, are loaded when they are first asked for.
_LATE_NAMES = {
    "Along": "penstock.step.microbatches",
    "Checkpoints": "penstock.checkpoint.checkpoints",
    "Choices": "penstock.planner.search.choices",
    "FaultInjection": "penstock.ranks.fault_injection",
    "Drop": "penstock.ranks.fault_injection",
    "ElasticStep": "penstock.elastic",
    "Finding": "penstock.planner.search.findings",
    "Findings": "penstock.planner.search.findings",
    "Job": "penstock.elastic",
    "Pipe": "penstock.splitting.pipe",
    "Pipeline": "penstock.training.pipeline",
    "PipelineStage": "penstock.dropin",
    "Plan": "penstock.planner.plans",
    "Ready": "penstock.step.microbatches",
    "Restored": "penstock.checkpoint.checkpoints",
    "Schedule1F1B": "penstock.dropin",
    "ScheduleDualPipeV": "penstock.dropin",
    "ScheduleGPipe": "penstock.dropin",
    "ScheduleInterleaved1F1B": "penstock.dropin",
    "ScheduleInterleavedZeroBubble": "penstock.dropin",
    "ScheduleLoopedBFS": "penstock.dropin",
    "ScheduleZBVZeroBubble": "penstock.dropin",
    "Shared": "penstock.step.microbatches",
    "SplitPoint": "penstock.splitting.marks",
    "StepResult": "penstock.training.pipeline",
    "Timeouts": "penstock.alive.timeouts",
    "add_loss": "penstock.loss.added",
    "balance": "penstock.measuring.balance",
    "build_stage": "penstock.dropin",
    "find_loss": "penstock.splitting.output_loss",
    "get_schedule_class": "penstock.dropin.schedules",
    "here_only": "penstock.splitting.by_layers.hooks.hooks",
    "measure": "penstock.measuring.stages",
    "measure_closely": "penstock.measuring.stages",
    "measure_layers": "penstock.measuring.layers",
    "measure_links": "penstock.measuring.links",
    "pipe_split": "penstock.splitting.marks",
    "pipeline": "penstock.dropin",
    "plan": "penstock.planner.planning",
    "read_timeline": "penstock.files.timeline",
    "read_trace": "penstock.files.trace.reading",
    "review": "penstock.sim.review",
    "revise": "penstock.planner.revision",
    "search": "penstock.planner.search.search",
    "split": "penstock.splitting.splitter",
    "train_elastically": "penstock.elastic",
    "write_timeline": "penstock.files.timeline",
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
    "Drop",
    "ElasticStep",
    "Explanation",
    "FaultInjection",
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
    "Timeouts",
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
