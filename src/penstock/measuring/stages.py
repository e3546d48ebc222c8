"""What the stages of a model cost on this machine: seconds and bytes, from real microbatches.

The stages run one after the other in this process, so a model that fits on one device can be
measured for any number of ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.ir.actions import Kind
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.measuring.collectives import collective_seconds, has_collectives
from penstock.measuring.host_link import measure_host_link
from penstock.measuring.optimizer_state import MakeOptimizer, count_optimizer_bytes
from penstock.measuring.stability import is_stable, spread_of, warn_if_unstable
from penstock.measuring.stage_bytes import ActionBytes
from penstock.modules.untouched import untouched
from penstock.sim.timeline import Timeline
from penstock.splitting.by_layers.layer_stage import FirstLayerStage, LayerStage
from penstock.splitting.pipe import Pipe, require_stages
from penstock.step.microbatches import Ready, count_rows
from penstock.training.build.device import find_device
from penstock.training.options import RunOptions
from penstock.training.pipeline import Pipeline

__all__ = ["Measurement", "measure", "measure_closely"]

_SECONDS = {
    "forward": Kind.FORWARD,
    "backward_input": Kind.BACKWARD_INPUT,
    "backward_weight": Kind.BACKWARD_WEIGHT,
    "full_backward": Kind.FULL_BACKWARD,
}
# A step is recorded again until its seconds vary little, at most this often.
_MOST_STEPS = 4


@dataclass(frozen=True, slots=True)
class Measurement:
    """Costs, and how reliable their seconds are.

    `spread` has the interquartile range of the samples, as a share of their median, for each kind
    of compute and each stage.
    """

    costs: Costs
    spread: Mapping[str, tuple[float, ...]]

    def __str__(self) -> str:
        lines = ["stage" + "".join(f"{_SECONDS[name].text + ' ms':>15}" for name in self.spread)]
        for stage in range(len(self.spread["forward"])):
            cells = (self._cell(name, stage) for name in self.spread)
            lines.append(f"{stage:5}" + "".join(cells))
        return "\n".join(lines)

    def _cell(self, name: str, stage: int) -> str:
        spread = self.spread[name]
        seconds = self.costs.per_stage(name, len(spread))[stage]
        return f"{1e3 * seconds:9.3f} ±{spread[stage]:4.0%}"


@dataclass(frozen=True, slots=True)
class _Sample:
    """One microbatch with its target and loss, and how often and where it runs."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    loss: Callable[..., torch.Tensor]
    repeats: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Observed:
    """Recorded steps, and the bytes of an earlier one."""

    timelines: tuple[Timeline, ...]
    bytes: ActionBytes


def measure(
    stages: Pipe | Sequence[nn.Module],
    *,
    example: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., torch.Tensor],
    target: Any = None,
    repeats: int = 5,
    device: torch.device | str | None = None,
    optimizer: MakeOptimizer | None = None,
) -> Costs:
    """Measure seconds of F, I, W and B and bytes of every stage, for one microbatch.

    `example`, `example_kwargs` and `target` are that microbatch. Seconds are medians over
    `repeats` runs of it, after some that do not count, and over up to four times as many where
    they vary. If they vary too much even so, a `MeasurementWarning` says which; see
    `penstock.measuring.measure_closely` for the spread of all. `host_action` is what passes
    between two actions, and `host_link` how fast a GPU copies to its host and back. Activations
    are what a forward leaves in use on its rank, and the weight stash what is left of it after I.
    `optimizer` is a class such as `torch.optim.AdamW` or a function that makes one for a list of
    parameters; its state is counted from one step on a copy. The stages run where their
    parameters are; `device` is needed only for stages without
    parameters. Parameters, gradients, buffers and random numbers are not changed.
    """
    found = measure_closely(
        stages,
        example=example,
        example_kwargs=example_kwargs,
        loss=loss,
        target=target,
        repeats=repeats,
        device=device,
        optimizer=optimizer,
    )
    warn_if_unstable(found.spread)
    return found.costs


def measure_closely(
    stages: Pipe | Sequence[nn.Module],
    *,
    example: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., torch.Tensor],
    target: Any = None,
    repeats: int = 5,
    device: torch.device | str | None = None,
    optimizer: MakeOptimizer | None = None,
) -> Measurement:
    """Measure as `measure` does, and return the spread of the seconds instead of a warning."""
    if repeats < 1:
        raise ArgumentError(f"repeats must be at least 1 (got {repeats})")
    require_stages(stages)
    modules = stages.stages if isinstance(stages, Pipe) else tuple(stages)
    place = find_device(device, dict(enumerate(modules)))
    sample = _Sample(tuple(example), example_kwargs or {}, target, loss, repeats, place)
    with untouched(modules), _observed_for_now(modules):
        split = _observe(stages, len(modules), ("F", "I", "W"), sample)
        whole = _observe(stages, len(modules), ("F", "B"), sample)
        state = [
            0 if optimizer is None else count_optimizer_bytes(module, optimizer)
            for module in modules
        ]
    samples = {
        name: _seconds((*split.timelines, *whole.timelines), kind)
        for name, kind in _SECONDS.items()
    }
    costs = Costs.from_mapping(
        {name: [float(np.median(each)) for each in found] for name, found in samples.items()}
        | _bytes(split, whole)
        | {
            "parameter_bytes": [_count_bytes(module.parameters()) for module in modules],
            "gradient_bytes": [_count_bytes(_trained(module)) for module in modules],
            "optimizer_bytes": state,
            "host_action": _seconds_between(split.timelines),
        }
        | ({} if (link := measure_host_link(place)) is None else {"host_link": link})
        | _collectives(split.timelines, modules)
    )
    spread = {name: tuple(map(spread_of, found)) for name, found in samples.items()}
    return Measurement(costs, spread)


@contextmanager
def _observed_for_now(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave no hooks of stages on the layers of the model, which the stages share with it."""
    try:
        yield
    finally:
        for module in modules:
            if isinstance(module, FirstLayerStage | LayerStage):
                module.stop_observing()


def _observe(
    stages: Pipe | Sequence[nn.Module], count: int, kinds: Sequence[str], sample: _Sample
) -> _Observed:
    """Run every microbatch by itself through all stages and back, each stage on its own rank."""
    numbers = range(sample.repeats)
    orders = [[f"{s}{kind}{m}" for m in numbers for kind in kinds] for s in range(count)]
    schedule = Schedule.from_orders(orders, name="one by one")
    held = ActionBytes(sample.device)
    pipeline = Pipeline(
        stages,
        schedule,
        loss=sample.loss,
        ranks=count,
        # All microbatches are the same, so that nothing has to be found out about the loss.
        reduction="mean",
        device=sample.device,
        options=RunOptions(around=held.around),
    )
    batch = [_repeat(value, sample.repeats) for value in sample.args]
    named = {name: _repeat(value, sample.repeats) for name, value in sample.kwargs.items()}
    target = None if sample.target is None else _repeat(sample.target, sample.repeats)
    pipeline.step(*batch, target=target, **named)
    with held.counting():
        pipeline.step(*batch, target=target, **named)
    timelines: tuple[Timeline, ...] = ()
    while len(timelines) < _MOST_STEPS:
        timeline = pipeline.step(*batch, target=target, record=True, **named).timeline
        assert timeline is not None, "the step was recorded"
        timelines += (timeline,)
        kinds_run = {n: k for n, k in _SECONDS.items() if timeline.schedule.rows.has_kind(k)}
        if has_collectives(timelines):
            # Every process of the group runs the same steps, whatever it has measured itself.
            continue
        if is_stable({name: _seconds(timelines, kind) for name, kind in kinds_run.items()}):
            break
    return _Observed(timelines, held)


def _collectives(timelines: Sequence[Timeline], modules: Sequence[nn.Module]) -> dict[str, object]:
    """Return the seconds of collectives, if there were any; they occupy their rank."""
    if not has_collectives(timelines):
        return {}
    is_gathered = [any(isinstance(m, FSDPModule) for m in stage.modules()) for stage in modules]
    samples = collective_seconds(timelines, is_gathered)
    medians = {name: [float(np.median(each)) for each in found] for name, found in samples.items()}
    return medians | {"collective_overlap": 0.0}


def _repeat(value: Any, repeats: int) -> Any:
    """Return the same value for every microbatch."""
    return value if count_rows(value) is None else Ready([value] * repeats)


def _seconds_between(timelines: Sequence[Timeline]) -> float:
    """Return the median seconds from the end of an action to the start of the next one.

    One process runs the actions of all ranks, one after the other.
    """
    gaps = []
    for timeline in timelines:
        order = np.argsort(timeline.start, kind="stable")
        gaps.append(timeline.start[order][1:] - timeline.end[order][:-1])
    return max(0.0, float(np.median(np.concatenate(gaps))))


def _seconds(timelines: Sequence[Timeline], kind: Kind) -> list[Floats]:
    """Return the seconds of each action of a kind, by stage."""
    return [
        np.concatenate(
            [
                (timeline.end - timeline.start)[
                    timeline.schedule.rows.is_kind(kind) & (timeline.schedule.rows.stage == stage)
                ]
                for timeline in timelines
            ]
        )
        for stage in range(timelines[0].schedule.num_stages)
    ]


def _bytes(split: _Observed, whole: _Observed) -> dict[str, object]:
    """Return the bytes that a microbatch needs."""
    flow, held = split.timelines[0].schedule.dataflow, split.bytes
    stages = range(flow.num_stages)
    return {
        "activation_bytes": [held.activation(flow, stage) for stage in stages],
        "weight_stash_bytes": [held.stash(flow, stage) for stage in stages],
        "message_bytes": [held.message(flow, stage) for stage in stages],
        "workspace_bytes": [
            max(held.workspace(stage), whole.bytes.workspace(stage)) for stage in stages
        ],
    }


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _count_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
