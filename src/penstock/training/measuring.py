"""What the stages of a pipe cost on this machine: seconds and bytes, from a few real microbatches.

The stages run one after the other in this process, so a model that fits on one device can be
measured for any number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch

from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.ir.actions import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.runtime.clocks import clock_for
from penstock.runtime.microbatch import Ready, count_rows
from penstock.sim.timeline import Timeline
from penstock.splitting.pipe import Pipe
from penstock.splitting.untouched import untouched
from penstock.training.live_memory import LiveMemory
from penstock.training.pipeline import Pipeline

__all__ = ["measure"]

_TIMED = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def measure(
    pipe: Pipe,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor],
    target: Any = None,
    microbatches: int = 5,
    device: torch.device | str = "cpu",
) -> Costs:
    """Seconds of F, I and W and bytes of every stage, for one microbatch as given.

    Seconds are medians over `microbatches`, after a first round that does not count. Activations
    are what a forward leaves alive, and the weight stash what is alive of it after I. Parameters,
    gradients, buffers and random numbers stay as they are.
    """
    if microbatches < 1:
        raise ArgumentError(f"microbatches must be at least 1 (microbatches: {microbatches})")
    bytes_held = _Bytes(torch.device(device))
    schedule = _one_by_one(pipe.num_stages, microbatches)
    pipeline = Pipeline(
        pipe,
        schedule,
        microbatches=microbatches,
        loss=loss,
        device=device,
        around=bytes_held.around,
    )
    batch = [_repeat(value, microbatches) for value in args]
    named: dict[str, Any] = {k: _repeat(v, microbatches) for k, v in (kwargs or {}).items()}
    targets = None if target is None else _repeat(target, microbatches)
    with untouched(pipe.stages):
        pipeline.step(*batch, target=targets, **named)
        with bytes_held.counting():
            pipeline.step(*batch, target=targets, **named)
        timeline = pipeline.step(*batch, target=targets, record=True, **named).timeline
    assert timeline is not None, "the step was recorded"
    forward, backward_input, backward_weight = (_seconds(timeline, kind) for kind in _TIMED)
    return Costs(
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        activation_bytes=bytes_held.after(pipe.num_stages, [Kind.FORWARD]),
        weight_stash_bytes=bytes_held.after(pipe.num_stages, [Kind.FORWARD, Kind.BACKWARD_INPUT]),
        parameter_bytes=[_parameter_bytes(stage) for stage in pipe.stages],
    )


def _repeat(value: Any, microbatches: int) -> Any:
    """The same value for every microbatch."""
    return value if count_rows(value) is None else Ready([value] * microbatches)


def _one_by_one(stages: int, microbatches: int) -> Schedule:
    """Every microbatch by itself through all stages and back, on one rank."""
    order = []
    for microbatch in range(microbatches):
        order += [f"{stage}F{microbatch}" for stage in range(stages)]
        order += [f"{stage}I{microbatch}" for stage in reversed(range(stages))]
        order += [f"{stage}W{microbatch}" for stage in reversed(range(stages))]
    return Schedule.from_orders([order], name="one by one")


def _seconds(timeline: Timeline, kind: Kind) -> list[float]:
    rows, stages = timeline.schedule.rows, timeline.schedule.num_stages
    seconds = timeline.end - timeline.start
    is_kind = rows.is_kind(kind)
    return [float(median(seconds[is_kind & (rows.stage == stage)])) for stage in range(stages)]


def _parameter_bytes(stage: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in stage.parameters())


class _Bytes:
    """How many bytes each action of a step leaves alive, more than there were before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = clock_for(device)
        self._live: LiveMemory | None = None
        self._left: dict[tuple[Kind, int], list[int]] = {}

    @property
    def around(self) -> dict[Kind, Callable[[Action, Callable[[], None]], None]]:
        """What is called in place of the actions that are looked at."""
        return {Kind.FORWARD: self._run, Kind.BACKWARD_INPUT: self._run}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Look at the actions of a step meanwhile."""
        self._live = LiveMemory()
        with self._live if self._device.type == "cpu" else nullcontext():
            yield
        self._live = None

    def _run(self, action: Action, run: Callable[[], None]) -> None:
        if self._live is None:
            run()
            return
        before = self._held()
        run()
        self._left.setdefault((action.kind, action.stage), []).append(self._held() - before)

    def _held(self) -> int:
        if self._device.type == "cpu":
            return self._live.bytes() if self._live is not None else 0
        return int(self._clock.held_bytes())

    def after(self, stages: int, kinds: list[Kind]) -> list[float]:
        """The bytes that are alive of each stage after these actions of a microbatch."""
        return [
            max(0.0, float(sum(median(self._left[kind, stage]) for kind in kinds)))
            for stage in range(stages)
        ]
