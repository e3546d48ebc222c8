"""How much each microbatch's loss, and each part of it, counts in the loss of the batch."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import BatchError
from penstock.loss.calls import LossCall
from penstock.loss.memory import KnownForm, LossMemory, Term
from penstock.loss.term_weights import ADVICE, Given

__all__ = ["KnownLoss", "KnownWeights", "LossPart", "Share", "Weigher", "make_parts"]


@dataclass(frozen=True, slots=True, eq=False)
class LossPart:
    """A part of a loss that counts more or less than the rest of it, by this weight."""

    value: torch.Tensor
    edge: GradientEdge | None
    weight: float


class Share(NamedTuple):
    """The weight of a microbatch's loss, and additional weights of parts of it."""

    weight: float
    parts: Sequence[LossPart] = ()


@dataclass(frozen=True, slots=True)
class KnownLoss:
    """A loss that is known: the signature and last operation of its graph, and its weights."""

    signature: str
    top: str
    shares: Sequence[Share]
    term: Term
    weights: Sequence[float]


class Weigher(Protocol):
    """The weights of the losses of a step's microbatches, found as the losses are computed."""

    @property
    def needs_graph(self) -> bool:
        """Whether the last stage of an evaluation must show what its loss consists of."""
        ...

    def observe_stage(self, module: nn.Module) -> AbstractContextManager[object] | None:
        """Return a context to run a last stage in, if it computes a loss that is not known yet."""
        ...

    def make_loss(
        self, function: Callable[..., Any], microbatch: int, output: Any, target: Any
    ) -> Any:
        """Call the loss function, perhaps more than once, and return what it returns."""
        ...

    def weigh(self, microbatch: int, loss: torch.Tensor) -> Share:
        """Return the weight of this loss."""
        ...

    def check(self) -> None:
        """Raise an error, at the end of the step, if a weight has turned out to be wrong."""
        ...

    def find_used(self) -> Collection[Sequence[float]]:
        """Return the weights found so far, each of a part of the losses in all microbatches."""
        ...


class KnownWeights:
    """Weights that are known before the step."""

    needs_graph = False

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = [Share(weight) for weight in weights]

    def observe_stage(self, module: nn.Module) -> None:
        """Observe nothing."""

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
        return self._shares[microbatch]

    def check(self) -> None:
        """Accept the step."""

    def find_used(self) -> Collection[Sequence[float]]:
        """Return nothing, since every rank knows these weights."""
        return ()


def make_parts(
    memory: LossMemory,
    given: Given,
    loss: torch.Tensor,
    used: Sequence[LossCall],
    extra: Sequence[float],
) -> list[LossPart]:
    """Return the parts of a loss with their weights beyond that of the whole loss.

    `extra` has a weight for each call. The names of the given arguments are the keys of the
    memory.
    """
    known = memory.forms.get(given.names)
    trained: list[torch.Tensor | None] = [None] * len(used)
    if loss.requires_grad and known is not None:
        edges = [call.edge for call in used if call.edge is not None]
        found = torch.autograd.grad(loss, edges, retain_graph=True, create_graph=True)
        trained = [factor if factor.requires_grad else None for factor in found]
        factors = tuple(factor.item() for factor in found)
        is_trained = any(factor is not None for factor in trained)
        known = KnownForm(known.num_calls, known.form, factors, is_trained, given.items)
        memory.forms[given.names] = known
    elif known is None or not _still_holds(known, loss, used, given.items):
        raise BatchError(
            "the factors of a loss's parts must be known if the parts have different weights, "
            "but a loss without a graph does not show them (got an evaluation in which nothing "
            "that makes the loss needs gradients, and no step before it with these factors); call "
            "step first, or evaluate with microbatches=1, as trainers do with batches of one row, "
            f"or {ADVICE}"
        )
    parts = []
    current = _factors_now(known, used, given.items)
    for call, factor, graph, weight in zip(used, current, trained, extra, strict=True):
        if weight:
            parts.append(LossPart(call.value, call.edge, factor * weight))
        if weight and graph is not None:
            # The gradient of the factor itself; its value is part of the loss already.
            edge = get_gradient_edge(graph)
            parts.append(
                LossPart(torch.zeros_like(graph.detach()), edge, float(call.value) * weight)
            )
    return parts


def _factors_now(
    known: KnownForm, used: Sequence[LossCall], items: float | None
) -> Sequence[float]:
    """Return the factors of the last step with a graph; sums are divided by another count now."""
    if not items or known.items is None:
        return known.factors
    change = known.items / items
    return [
        factor * change if call.reduction == "sum" else factor
        for factor, call in zip(known.factors, used, strict=True)
    ]


def _still_holds(
    known: KnownForm, loss: torch.Tensor, used: Sequence[LossCall], items: float | None
) -> bool:
    """Whether a loss without a graph may have the factors of the last step."""
    if len(known.factors) != len(used):
        return False
    if known.form.has_rest:
        return not known.has_trained_factor
    factors = _factors_now(known, used, items)
    found = sum(factor * float(c.value) for factor, c in zip(factors, used, strict=True))
    return math.isclose(found, float(loss), rel_tol=256 * torch.finfo(loss.dtype).eps)
