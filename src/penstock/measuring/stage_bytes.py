"""What a stage holds of one microbatch, from what each of its actions does to the memory.

    rank of the stage     input arrives   F        output leaves   gradient arrives   I  ...
    bytes in use          + message       + left   + left - sent   + gradient         + left

Every stage has a rank of its own for this, so that a send copies what it sends: the peak while it
runs, above what was in use before, is the message.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock.ir.actions import Action, Kind
from penstock.ir.dataflow import Dataflow
from penstock.measuring.memory_meters import MemoryReading, meter_for
from penstock.step.step_data import Around

__all__ = ["ActionBytes"]

_MEASURED = (
    Kind.FORWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.FULL_BACKWARD,
    Kind.SEND_F,
    Kind.SEND_B,
)


@dataclass(frozen=True, slots=True)
class _Key:
    kind: Kind
    stage: int
    peer: int | None = None


class ActionBytes:
    """What the actions of the first microbatch of a step do to the memory."""

    def __init__(self, device: torch.device) -> None:
        self._meter = meter_for(device)
        self._is_counting = False
        self._readings: dict[_Key, MemoryReading] = {}

    @property
    def around(self) -> dict[Kind, Around]:
        """Functions to be called around the actions that are measured."""
        return dict.fromkeys(_MEASURED, self._run)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Measure the actions of a step that runs inside."""
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def _run(self, action: Action, run: Callable[[], None]) -> None:
        if self._is_counting and action.microbatch == 0:
            key = _Key(action.kind, action.stage, action.peer)
            self._readings[key] = self._meter.measure(run)
        else:
            run()

    def message(self, flow: Dataflow, stage: int) -> int:
        """Return the bytes that a stage receives for its forward."""
        return sum(self._sent(Kind.SEND_F, other, stage) for other in flow.producers(stage))

    def activation(self, flow: Dataflow, stage: int) -> int:
        """Return the bytes that a stage keeps after its forward, once its output is sent."""
        left = self._readings[_Key(Kind.FORWARD, stage)].left
        sends = [_Key(Kind.SEND_F, stage, other) for other in flow.consumers(stage)]
        return max(0, self.message(flow, stage) + left + self._left_by_sending(sends))

    def stash(self, flow: Dataflow, stage: int) -> int:
        """Return the bytes still in use after I, once the gradient of its input is sent."""
        left = self._readings[_Key(Kind.BACKWARD_INPUT, stage)].left
        sends = [_Key(Kind.SEND_B, stage, other) for other in flow.producers(stage)]
        arrived = sum(self._sent(Kind.SEND_B, other, stage) for other in flow.consumers(stage))
        here = self.activation(flow, stage) + arrived + left
        return max(0, here + self._left_by_sending(sends))

    def workspace(self, stage: int) -> int:
        """Return the most bytes that an action of this stage needs only while it runs."""
        found = (
            reading.workspace
            for key, reading in self._readings.items()
            if key.stage == stage and key.kind.is_compute
        )
        return max(found)

    def _sent(self, kind: Kind, stage: int, peer: int) -> int:
        reading = self._readings[_Key(kind, stage, peer)]
        return reading.peak - reading.before

    def _left_by_sending(self, sends: list[_Key]) -> int:
        """Return the bytes that sends leave in use on the sender; negative if they free some."""
        return sum(
            self._readings[key].left - self._sent(key.kind, key.stage, key.peer or 0)
            for key in sends
        )
