"""The weights of losses that are computed as in the step before, as nearly all are.

    each microbatch   one look at the graph of its loss, which must be the known one
    the step          what all losses counted is compared with the labels, once

The first loss with another graph, and all that follow, are left to `ComparedWeights`.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from penstock.loss.form import read_count, sign_graph
from penstock.loss.probe import ComparedWeights
from penstock.loss.reduction import round_weights
from penstock.loss.rerun import LossMade, versions_of
from penstock.loss.weigher import KnownLoss, Share, Weigher

__all__ = ["weigh_steadily"]


def weigh_steadily(careful: ComparedWeights) -> Weigher:
    """Return weights that look less closely, if enough is known of the loss."""
    known = careful.find_known()
    return careful if known is None else _SteadyWeights(careful, known)


class _SteadyWeights:
    """The weights of one step in which nothing new is expected."""

    needs_graph = False

    def __init__(self, careful: ComparedWeights, known: KnownLoss) -> None:
        self._careful = careful
        self._known = known
        self._is_steady = True
        self._weighed: list[int] = []
        # What the losses counted, by microbatch, where the graph says it.
        self._found: dict[int, torch.Tensor | float] = {}

    def observe_stage(self, module: nn.Module) -> None:
        """Observe nothing, because these losses are not computed inside of a stage."""

    def make_loss(
        self, function: Callable[..., Any], microbatch: int, output: Any, target: Any
    ) -> Any:
        """Call the loss function, and look at the graph of what it returns."""
        if not self._is_steady:
            return self._careful.make_loss(function, microbatch, output, target)
        versions = versions_of(output, target)
        loss = function(output, target)
        if type(loss) is torch.Tensor and sign_graph(loss, output) == self._known.signature:
            return loss
        self._is_steady = False
        self._careful.found.note_repeated(self._known, self._weighed)
        return self._careful.settle(LossMade(function, output, target, versions), microbatch, loss)

    def weigh(self, microbatch: int, loss: torch.Tensor) -> Share:
        """Return the weight of a loss, and note what it counted."""
        if not self._is_steady:
            return self._careful.weigh(microbatch, loss)
        self._weighed.append(microbatch)
        found = read_count(loss, self._known.top)
        if found is not None:
            self._found[microbatch] = found
        return self._known.shares[microbatch]

    def find_used(self) -> Collection[Sequence[float]]:
        """Return the weights of the known loss, and of what differed from it."""
        known = [round_weights(self._known.weights)] if self._weighed else []
        return {*known, *self._careful.find_used()}

    def check(self) -> None:
        """Raise if a loss counted something else than its labels."""
        self._careful.found.expect_counts(self._known.term, self._found)
        self._careful.check()
