"""The parts of a stage that can be deferred: linear layers, other weights, compiled modules."""

from collections.abc import Iterator, Set
from operator import is_

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from penstock.deferred.linear import DeferredLinear
from penstock.modules.compiled import is_compiled

__all__ = ["StageWeights"]

# Modules that never compute a single product with their weights.
_NO_PRODUCTS = (nn.RNNBase, nn.RNNCellBase, nn.EmbeddingBag, nn.Bilinear, ParametrizationList)


class StageWeights:
    """The linear layers of a stage, made deferred, and the other weights that may be deferred."""

    def __init__(self, *modules: nn.Module) -> None:
        compiled = [part for module in modules for part in _compiled_modules(module)]
        self.compiled = [
            part for part in compiled if any(p.requires_grad for p in part.parameters())
        ]
        # Compiled code depends on the type of a weight, so that these keep theirs.
        self._compiled_weights = {p for part in compiled for p in part.parameters()}
        eager = list(dict.fromkeys(part for module in modules for part in _eager_modules(module)))
        self._layers = [part for part in eager if _is_plain_linear(part)]
        for layer in self._layers:
            layer.__class__ = DeferredLinear
        linear = set(self._layers)
        self._places = [
            (part._parameters, name)
            for part in eager
            if part not in linear and not isinstance(part, _NO_PRODUCTS)
            for name in part._parameters
        ]
        self._whole: set[torch.Tensor] = set()
        self.watched: list[nn.Parameter] = []
        self._found: list[nn.Parameter | None] = []
        self._trained: list[bool] = []
        self.look_again()

    def look_again(self) -> None:
        """Find the weights of the modules again, if any was replaced, frozen or unfrozen.

        FSDP replaces weights while they are gathered.
        """
        found = [parameters.get(name) for parameters, name in self._places]
        trained = [weight is not None and weight.requires_grad for weight in found]
        if trained == self._trained and all(map(is_, found, self._found)):
            return
        self._found, self._trained = found, trained
        self.watched = [
            weight
            for weight in found
            if weight is not None
            and _can_be_deferred(weight)
            and weight not in self._whole
            and weight not in self._compiled_weights
        ]

    def leave_out(self, weights: Set[torch.Tensor]) -> None:
        """Defer these weights no longer, since they were never part of a product."""
        if weights:
            self._whole |= weights
            self.watched = [weight for weight in self.watched if weight not in weights]

    def are_trained(self) -> bool:
        """Whether the gradient of any weight might be deferred."""
        places = [*self._places, *((layer._parameters, "weight") for layer in self._layers)]
        weights = (parameters.get(name) for parameters, name in places)
        return any(w is not None and w.requires_grad and _may_be_matrix(w) for w in weights)


def _may_be_matrix(weight: torch.Tensor) -> bool:
    # The shape of a lazy weight is unknown before its module has run.
    return isinstance(weight, UninitializedParameter) or weight.dim() >= 2


def _can_be_deferred(weight: nn.Parameter) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and weight.dim() >= 2
        and weight.numel() > 0
        and weight.is_floating_point()
    )


def _eager_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those below it, except for compiled ones."""
    if is_compiled(module):
        return
    yield module
    for child in module.children():
        yield from _eager_modules(child)


def _compiled_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost compiled modules at and below a module."""
    if is_compiled(module):
        yield module
        return
    for child in module.children():
        yield from _compiled_modules(child)


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether this is torch's own layer with its weight; a normed or pruned layer hides it."""
    weight = module._parameters.get("weight")
    return (
        type(module) in (nn.Linear, DeferredLinear) and weight is not None and weight.numel() > 0
    )
