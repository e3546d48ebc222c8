"""What each microbatch's loss counts for in the loss of the batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

__all__ = ["KnownWeights", "Part", "Share", "Weigher"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a loss that counts for more or less than the rest of it, by this weight."""

    value: torch.Tensor
    edge: GradientEdge | None
    weight: float


@dataclass(frozen=True, slots=True)
class Share:
    """The weight of a microbatch's loss, and of parts of it beside that."""

    weight: float
    parts: Sequence[Part] = ()


class Weigher(Protocol):
    """Says what the losses of a step's microbatches count for, once each of them is made."""

    def watch_stage(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return what to run a last stage in, since a model may make its loss itself."""
        ...

    def make_loss(
        self, function: Callable[..., Any], microbatch: int, output: Any, target: Any
    ) -> Any:
        """Call the loss function, whatever it returns; it may be called again to look closer."""
        ...

    def weigh(self, microbatch: int, loss: torch.Tensor) -> Share:
        """Return what this loss counts for."""
        ...

    def check(self) -> None:
        """Raise, at the end of the step, if a weight has turned out to be wrong."""
        ...


class KnownWeights:
    """Weights that are known before the step."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights

    def watch_stage(self, module: nn.Module) -> AbstractContextManager[object]:  # noqa: ARG002  # Weigher's form
        """Return a context that does nothing."""
        return nullcontext()

    def make_loss(
        self,
        function: Callable[..., Any],
        microbatch: int,  # noqa: ARG002  # Weigher's form
        output: Any,
        target: Any,
    ) -> Any:
        """Call the loss function."""
        return function(output, target)

    def weigh(self, microbatch: int, loss: torch.Tensor) -> Share:  # noqa: ARG002  # Weigher's form
        """Return the weight of the microbatch."""
        return Share(self._weights[microbatch])

    def check(self) -> None:
        """Accept the step."""
