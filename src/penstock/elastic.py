"""Training that continues when machines leave or join: the loop of every torchrun process.

torchrun restarts all processes when their number has changed or one has failed. Each start
runs the same steps:

meet  ->  plan for them  ->  load the last checkpoint  ->  train and save  ->  done
                 (same costs)       (from any layout)                  |
                                                         a rank is lost: all processes end, and
                                                         torchrun restarts those that are left
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun

from penstock.alive.guard import Guard
from penstock.alive.guard_opening import open_guard, open_guard_of_start
from penstock.alive.timeouts import DEFAULT_TIMEOUTS, Timeouts
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.errors import ArgumentError, PlanError
from penstock.loss.reduction import Reduction
from penstock.measuring.layers import measure_layers
from penstock.planner.partition.pieces import Piece
from penstock.planner.plans import Plan
from penstock.planner.search.layer_files import LayerCosts, read_layers, write_layers
from penstock.planner.search.search import search
from penstock.ranks.control import GroupControl, cannot
from penstock.ranks.starting import meet_at_start
from penstock.splitting.splitter import split
from penstock.step.microbatches import split_batch
from penstock.torch_private import PrefixStore, tree_map_only
from penstock.training.build.device import find_device
from penstock.training.pipeline import Pipeline

__all__ = ["ElasticStep", "Job", "launch", "train_elastically"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A training run, for any number of ranks.

    `model()` returns the model, with the same numbers in every process, and `layers` names its
    lists of layers. `batch(step)` returns the model's positional arguments and the target of a
    step, the same in every process: since data depends on the step alone, nothing is skipped or
    seen twice. A batch has `rows` rows, cut into `microbatches`. `costs` is what the layers cost
    for one microbatch, and what the optimizer holds for them; without it they are measured once
    and kept. The planner keeps to `memory` bytes per rank. `seed` makes dropout the same for every
    number of ranks; see `Pipeline`.
    """

    model: Callable[[], nn.Module]
    layers: str | Sequence[str]
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: Callable[[int], tuple[tuple[Any, ...], Any]]
    rows: int
    microbatches: int
    steps: int
    reduction: Reduction = "auto"
    costs: Sequence[Piece] | None = None
    memory: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if min(self.rows, self.microbatches, self.steps) < 1 or self.rows % self.microbatches:
            raise ArgumentError(
                f"rows must be a multiple of microbatches, and steps at least 1 (rows: "
                f"{self.rows}, microbatches: {self.microbatches}, steps: {self.steps})"
            )


@dataclass(frozen=True, slots=True)
class ElasticStep:
    """A finished step: its number from 1, its loss, and how many ranks ran it."""

    number: int
    loss: float
    ranks: int


def train_elastically(
    job: Job,
    folder: Path | str,
    *,
    save_every: int = 100,
    plan_seconds: float = 10.0,
    on_step: Callable[[ElasticStep], None] = lambda _step: None,
    device: torch.device | str | None = None,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
) -> Pipeline:
    """Train a job to its last step, from its last checkpoint on; every process calls it.

    Run it under `python -m penstock.elastic`, which is torchrun with a setting: it starts all
    processes again after a failure and after a change in their number. `folder` must be visible to
    all of them; it holds checkpoints, the measured costs and a plan per number of ranks, each
    searched once for `plan_seconds`. `on_step` is called on every rank; steps since the last
    checkpoint run again after a restart, with the same losses. The stages are moved to `device`,
    or stay where `job.model()` puts them. Returns the trained pipeline.
    """
    if save_every < 1:
        raise ArgumentError(f"save_every must be at least 1 step (got {save_every})")
    _require_fresh_store()
    model = job.model()
    home = find_device(None, {0: model}) if device is None else find_device(device, {})
    root = Path(folder).absolute()
    with closing(_start(home, timeouts)) as guard:
        ranks = dist.get_world_size()
        with guard.call():
            control = GroupControl(_world(), connections=guard.connections)
            plan = _share_plan(control, job, model, root, home, plan_seconds)
        with guard.call():
            pipeline = _build(job, model, plan, home, timeouts)
    optimizer = job.optimizer(pipeline.parameters())
    with Checkpoints(root / "checkpoints") as checkpoints:
        restored = checkpoints.load(pipeline, optimizer)
        first = 0 if restored is None else restored.step
        _logger.info("%d ranks continue after step %d: %s", ranks, first, plan.schedule.name)
        for step in range(first, job.steps):
            args, target = job.batch(step)
            result = pipeline.step(*args, target=target)
            optimizer.step()
            optimizer.zero_grad()
            assert result.loss is not None, "a training step has a loss"
            on_step(ElasticStep(step + 1, result.loss, ranks))
            if (step + 1) % save_every == 0 or step + 1 == job.steps:
                checkpoints.save(step + 1, pipeline, optimizer)
    return pipeline


def _start(device: torch.device, timeouts: Timeouts) -> Guard:
    """Join the other processes, which watch one another from their first meeting on."""
    if dist.is_initialized():
        return open_guard(_world(), (), timeouts)
    store, rank, size = meet_at_start(timeouts.join_seconds)
    guard = open_guard_of_start(store, rank, size, timeouts)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with guard.call():
        dist.init_process_group(
            backend, store=PrefixStore("default_pg", store), rank=rank, world_size=size
        )
    return guard


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "torch.distributed is running"
    return dist.group.WORLD


def _build(
    job: Job, model: nn.Module, plan: Plan, device: torch.device, timeouts: Timeouts
) -> Pipeline:
    """Split the model as the plan says, and build its pipeline on this device."""
    assert plan.choices is not None, "a search has made the plan"
    example, _ = _first_microbatch(job, find_device(None, {0: model}))
    pipe = split(model, layers=job.layers, stages=plan.choices.sizes, example=example)
    for stage in plan.schedule.placement.stages(dist.get_rank()):
        pipe.stages[stage].to(device)
    is_alone = dist.get_world_size() == 1
    return Pipeline(
        pipe,
        plan,
        loss=job.loss,
        reduction=job.reduction,
        group=None if is_alone else dist.group.WORLD,
        ranks=1 if is_alone else None,
        device=device,
        seed=job.seed,
        timeouts=timeouts,
    )


def _require_fresh_store() -> None:
    """Refuse a torchrun whose restarts would read the addresses of an earlier start."""
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_shared and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise ArgumentError(
            "torchrun on several machines must not share one store between restarts, because "
            "processes would find those of an earlier start in it; start python -m "
            "penstock.elastic in place of torchrun, with the same arguments"
        )


def _share_plan(
    control: GroupControl,
    job: Job,
    model: nn.Module,
    folder: Path,
    device: torch.device,
    seconds: float,
) -> Plan:
    """Return the plan for this number of ranks: the first rank finds it, all read it."""
    ranks, is_first = control.size, control.rank == 0
    costs_file = folder / "layers.json"
    with control.together(cannot("measure the layers")):
        if is_first and job.costs is None and not costs_file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            found = _measure(job, model, device)
            write_layers(costs_file, found)
    pieces = _given(job) if job.costs is not None else read_layers(costs_file)
    plan_file = folder / f"plan-{ranks}-ranks-{_digest(job, pieces)}.json"
    with control.together(cannot("find a plan")):
        if is_first and not _is_plan(plan_file):
            folder.mkdir(parents=True, exist_ok=True)
            plan = search(
                pieces.layers,
                ranks=ranks,
                batch=job.rows,
                memory=job.memory,
                transfer=pieces.transfer,
                host_message=pieces.host_message,
                seconds=seconds,
            ).best
            plan.to_file(plan_file)
    return Plan.from_file(plan_file)


def _is_plan(file: Path) -> bool:
    """Return whether a plan was kept; a damaged one would end every start."""
    try:
        Plan.from_file(file)
    except (PlanError, OSError):
        return False
    return True


def _given(job: Job) -> LayerCosts:
    assert job.costs is not None, "the job has costs"
    size = job.rows // job.microbatches
    return LayerCosts({size: tuple(job.costs)}, {size: 0.0})


def _measure(job: Job, model: nn.Module, device: torch.device) -> LayerCosts:
    """Measure the layers on one microbatch of the first batch."""
    example, target = _first_microbatch(job, device)
    pieces = measure_layers(
        model.to(device),
        layers=job.layers,
        example=example,
        loss=job.loss,
        target=target,
        optimizer=job.optimizer,
        device=device,
    )
    return _given(replace(job, costs=pieces))


def _first_microbatch(job: Job, device: torch.device) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments and the target of the first microbatch, on this device."""
    args, target = job.batch(0)
    first = [split_batch(value, job.microbatches)[0] for value in (*args, target)]
    *parts, wanted = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), first)
    return tuple(parts), wanted


def _digest(job: Job, costs: LayerCosts) -> str:
    """Return a name for what a plan depends on, beside the number of ranks."""
    facts = repr((costs.layers, costs.transfer, job.rows, job.memory))
    return blake2b(facts.encode(), digest_size=6).hexdigest()


def launch(arguments: Sequence[str] | None = None) -> None:
    """Run torchrun, with a new store for every start; `python -m penstock.elastic` does this.

    A process would find those of an earlier start in a store that restarts share, and a machine
    that joins later would wait for an address in it that nobody writes again.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torchrun(arguments)


if __name__ == "__main__":
    launch()
