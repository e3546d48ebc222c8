"""What a step returns."""

from typing import Any

import torch

from penstock.sim.timeline import Timeline
from penstock.training.loss_value import LossValue

__all__ = ["StepResult"]


class StepResult:
    """The result of one step. The loss is that of the whole batch, and known on every rank.

    Where it is computed on a device, the step does not wait for it: reading it does. Outputs are
    present on ranks that hold a last stage, if asked for; the timeline is present if the step was
    recorded.

    >>> StepResult(0.25, torch.zeros(8, 4))
    StepResult(loss=0.25, outputs=Tensor (8, 4))
    """

    __slots__ = ("_loss", "outputs", "timeline")

    def __init__(
        self,
        loss: float | LossValue | None,
        outputs: Any = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._loss = loss
        self.outputs = outputs
        self.timeline = timeline

    @property
    def loss(self) -> float | None:
        """The loss of the whole batch; any rank may read it, at any time, or none at all."""
        loss = self._loss
        if not (loss is None or isinstance(loss, int | float)):
            self._loss = loss = loss.read()
        return loss

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepResult):
            return NotImplemented
        mine, theirs = self.loss, other.loss
        return (mine, self.outputs, self.timeline) == (theirs, other.outputs, other.timeline)

    def __reduce__(self) -> tuple[type["StepResult"], tuple[Any, ...]]:
        """Pickle the loss as a number, which another process could not fetch."""
        return StepResult, (self.loss, self.outputs, self.timeline)

    def __repr__(self) -> str:
        parts = [f"loss={self.loss!r}"]
        if self.outputs is not None:
            parts.append(f"outputs={_describe(self.outputs)}")
        if self.timeline is not None:
            parts.append(f"timeline={self.timeline.end_time:.4g} s")
        return f"StepResult({', '.join(parts)})"


def _describe(value: Any) -> str:
    """Return the type of a value, and the shape of a tensor."""
    name = type(value).__name__
    return f"{name} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else name
