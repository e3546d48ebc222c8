"""What a step returns."""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.sim.timeline import Timeline

__all__ = ["StepResult"]


@dataclass(frozen=True, slots=True, repr=False)
class StepResult:
    """The result of one step. The loss is that of the whole batch, and known on every rank.

    Outputs are present on ranks that hold a last stage, if asked for; the timeline is present if
    the step was recorded.

    >>> StepResult(0.25, torch.zeros(8, 4))
    StepResult(loss=0.25, outputs=Tensor (8, 4))
    """

    loss: float | None
    outputs: Any = None
    timeline: Timeline | None = None

    def __repr__(self) -> str:
        parts = [f"loss={self.loss!r}"]
        if self.outputs is not None:
            parts.append(f"outputs={_describe(self.outputs)}")
        if self.timeline is not None:
            parts.append(f"timeline={self.timeline.makespan:.4g} s")
        return f"StepResult({', '.join(parts)})"


def _describe(value: Any) -> str:
    """Return the type of a value, and the shape of a tensor."""
    name = type(value).__name__
    return f"{name} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else name
