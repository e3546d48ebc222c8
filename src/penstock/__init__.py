"""Penstock: plan, run and see pipeline-parallel training on PyTorch."""

from penstock.assembly import build, lower
from penstock.checks.problem import Problem
from penstock.checks.report import check, find_problems
from penstock.costs import Costs
from penstock.errors import (
    CostsError,
    DeadlockError,
    MissingDependencyError,
    ParseError,
    PenstockError,
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
from penstock.schedules.registry import register
from penstock.sim.engine import simulate
from penstock.sim.explain import Explanation, Gap, Saving, explain
from penstock.sim.timeline import Span, Timeline

__all__ = [
    "Action",
    "Costs",
    "CostsError",
    "Dataflow",
    "DeadlockError",
    "Explanation",
    "Gap",
    "Kind",
    "MissingDependencyError",
    "Overlap",
    "ParseError",
    "PenstockError",
    "Placement",
    "Problem",
    "Saving",
    "Schedule",
    "ScheduleError",
    "ScheduleNameError",
    "SizeError",
    "Span",
    "Timeline",
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
]
