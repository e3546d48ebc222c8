"""Penstock: plan, run and see pipeline-parallel training on PyTorch.

The names here are what most programs need. Behind them are packages, each with its own names:

- `errors`: every exception; `checks`: all problems of a schedule at once; `passes`: schedules
  from schedules; `sim`: what simulations and explanations are made of
- `planner`: what plans and searches return; `measuring`: measurements in detail; `files`:
  timelines and traces on disk
- `view`: pictures, pages and traces; `checkpoint`, `elastic`: what saving and restarting return
- `testing`: faults on purpose, and a step against the unsplit model
- `dropin`: the names of `torch.distributed.pipelining`
"""

from importlib import import_module
from sys import modules
from typing import TYPE_CHECKING, Any

from penstock.assembly import build, lower
from penstock.checks.report import check
from penstock.costs import Costs
from penstock.errors import PenstockError
from penstock.ir.actions import Action, Kind, Overlap
from penstock.ir.dataflow import Dataflow, Routed
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.missing_torch import torch_needed_by
from penstock.schedules.registry import register
from penstock.sim.engine import simulate
from penstock.sim.explain import explain
from penstock.sim.timeline import Timeline

if TYPE_CHECKING:
    from penstock import checkpoint as checkpoint
    from penstock import checks as checks
    from penstock import dropin as dropin
    from penstock import elastic as elastic
    from penstock import errors as errors
    from penstock import files as files
    from penstock import measuring as measuring
    from penstock import passes as passes
    from penstock import planner as planner
    from penstock import sim as sim
    from penstock import testing as testing
    from penstock import view as view
    from penstock.alive.timeouts import Timeouts
    from penstock.alive.watching import watching
    from penstock.checkpoint.checkpoints import Checkpoints
    from penstock.elastic import Job, train_elastically
    from penstock.files.timeline import read_timeline, write_timeline
    from penstock.files.trace.reading import read_trace
    from penstock.loss.added import add_loss
    from penstock.measuring.balance import balance
    from penstock.measuring.layers import measure_layers
    from penstock.measuring.links import measure_links
    from penstock.measuring.stages import measure
    from penstock.planner.partition.partition import partition
    from penstock.planner.partition.pieces import Piece
    from penstock.planner.planning import plan
    from penstock.planner.plans import Plan
    from penstock.planner.revision import revise
    from penstock.planner.search.search import search
    from penstock.sim.recorded.review import review
    from penstock.splitting.by_layers.hooks.hooks import here_only
    from penstock.splitting.output_loss import find_loss
    from penstock.splitting.pipe import Pipe
    from penstock.splitting.splitter import split
    from penstock.step.microbatches import Along, Ready, Shared
    from penstock.step.overlap.communication import communicate
    from penstock.step.overlap.turning import turning_point
    from penstock.training.options import RunOptions
    from penstock.training.pipeline import Pipeline
    from penstock.training.step_result import StepResult

    __version__: str

# Loaded when first used: the planner, whatever needs torch, and the packages. The version is too:
# it is read from the metadata of the installed package.
_HOMES = {
    "Along": "penstock.step.microbatches",
    "Checkpoints": "penstock.checkpoint.checkpoints",
    "Job": "penstock.elastic",
    "Piece": "penstock.planner.partition.pieces",
    "Pipe": "penstock.splitting.pipe",
    "Pipeline": "penstock.training.pipeline",
    "Plan": "penstock.planner.plans",
    "Ready": "penstock.step.microbatches",
    "RunOptions": "penstock.training.options",
    "Shared": "penstock.step.microbatches",
    "StepResult": "penstock.training.step_result",
    "Timeouts": "penstock.alive.timeouts",
    "add_loss": "penstock.loss.added",
    "balance": "penstock.measuring.balance",
    "communicate": "penstock.step.overlap.communication",
    "find_loss": "penstock.splitting.output_loss",
    "here_only": "penstock.splitting.by_layers.hooks.hooks",
    "measure": "penstock.measuring.stages",
    "measure_layers": "penstock.measuring.layers",
    "measure_links": "penstock.measuring.links",
    "partition": "penstock.planner.partition.partition",
    "plan": "penstock.planner.planning",
    "read_timeline": "penstock.files.timeline",
    "read_trace": "penstock.files.trace.reading",
    "review": "penstock.sim.recorded.review",
    "revise": "penstock.planner.revision",
    "search": "penstock.planner.search.search",
    "split": "penstock.splitting.splitter",
    "train_elastically": "penstock.elastic",
    "turning_point": "penstock.step.overlap.turning",
    "watching": "penstock.alive.watching",
    "write_timeline": "penstock.files.timeline",
}
_ROOMS = (
    "checkpoint",
    "checks",
    "dropin",
    "elastic",
    "errors",
    "files",
    "measuring",
    "passes",
    "planner",
    "sim",
    "testing",
    "view",
)

__all__ = [
    "Action",
    "Along",
    "Checkpoints",
    "Costs",
    "Dataflow",
    "Job",
    "Kind",
    "Overlap",
    "PenstockError",
    "Piece",
    "Pipe",
    "Pipeline",
    "Placement",
    "Plan",
    "Ready",
    "Routed",
    "RunOptions",
    "Schedule",
    "Shared",
    "StepResult",
    "Timeline",
    "Timeouts",
    "add_loss",
    "balance",
    "build",
    "check",
    "communicate",
    "explain",
    "find_loss",
    "here_only",
    "lower",
    "measure",
    "measure_layers",
    "measure_links",
    "partition",
    "plan",
    "read_timeline",
    "read_trace",
    "register",
    "review",
    "revise",
    "search",
    "simulate",
    "split",
    "train_elastically",
    "turning_point",
    "watching",
    "write_timeline",
]

if "IPython" in modules:
    from penstock.view.notebook import join_notebook

    join_notebook()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("penstock.version").own_version()
    with torch_needed_by(f"penstock.{name}"):
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        if name in _ROOMS:
            return import_module(f"penstock.{name}")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    hidden = [name for name in globals() if name.startswith("__")]
    return sorted({*hidden, "__version__", *__all__, *_ROOMS})
