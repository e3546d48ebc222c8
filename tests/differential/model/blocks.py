"""A block of a model: what it computes, and everything that users do to a module.

What the other files have to know of kinds and traits is said here, in sets of names.
"""

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import penstock as ps
from tests.differential.case import Block
from tests.differential.model.layers import LAYERS
from tests.differential.model.oddities import ODDITIES
from tests.differential.model.products import PRODUCTS

__all__ = [
    "HOOKS",
    "IN_ORDER",
    "KINDS",
    "ONCE_DIFFERENTIABLE",
    "OWN_LINEAR",
    "REWEIGHINGS",
    "UNWRAPPED",
    "WITHIN_MICROBATCHES",
    "WRITABLE",
    "WrappedBlock",
    "first_linear",
    "reweigh",
]

KINDS: dict[str, Callable[[], nn.Module]] = {**LAYERS, **PRODUCTS, **ODDITIES}

# Kinds and traits that see which rows come together, or how many calls there were.
WITHIN_MICROBATCHES = frozenset(
    {"batch_norm", "moving_batch_norm", "dropout", "alternating", "clamp_hook"}
    | {"spectral_norm", "old_spectral_norm"}
)
# Those that give other numbers where microbatches come in another order.
IN_ORDER = frozenset({"moving_batch_norm", "spectral_norm", "old_spectral_norm"})
# Kinds and traits that checkpoints and compilers change, or refuse, in the plain model.
UNWRAPPED = frozenset({"inner_gradient", "lazy", "vmapped", *IN_ORDER})
# Those that the plain model cannot differentiate twice.
ONCE_DIFFERENTIABLE = frozenset(
    {"attention", "multi_head", "bag", "sparse_lookup", "compiled", "reentrant"}
)
# Kinds whose output the plain model lets a user write to.
WRITABLE = frozenset({"linear", "feedforward", "matmul", "functional", "einsum", "counter"})
# Kinds whose weight is that of an `nn.Linear` called `layer`.
OWN_LINEAR = frozenset({"linear", "reversal", "counter", "detached", "repeated", "dropout"})

HOOKS = (
    "tensor_hook", "module_hook", "forward_hook", "scale_hook", "clamp_hook", "sink_hook",
)  # fmt: skip


class _Symmetric(nn.Module):
    """A weight that is kept symmetric."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 0.5 * (weight + weight.t())


def _quietly(function: Callable[[nn.Linear], object], layer: nn.Linear) -> None:
    with warnings.catch_warnings():
        # The old ways are deprecated by torch, but models have them.
        warnings.simplefilter("ignore")
        function(layer)


REWEIGHINGS: dict[str, Callable[[nn.Linear], object]] = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer),
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer),
    "orthogonal": lambda layer: parametrizations.orthogonal(layer),
    "symmetric": lambda layer: parametrize.register_parametrization(layer, "weight", _Symmetric()),
    "old_weight_norm": lambda layer: nn.utils.weight_norm(layer),
    "old_spectral_norm": lambda layer: nn.utils.spectral_norm(layer),
    "prune": lambda layer: prune.random_unstructured(layer, "weight", 0.3),  # type: ignore[no-untyped-call]  # untyped upstream
}


def reweigh(name: str, layer: nn.Linear) -> None:
    """Let a layer make its weight from something else."""
    _quietly(REWEIGHINGS[name], layer)


def first_linear(module: nn.Module) -> nn.Linear | None:
    """The first linear layer in a module whose weight is a parameter of its own."""
    for found in module.modules():
        # A layer whose weight is made from something else has no such parameter.
        if isinstance(found, nn.Linear) and "weight" in found._parameters:
            return found
    return None


class WrappedBlock(nn.Module):
    """A block with what was done to it."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.inner = KINDS[block.kind]()
        self._traits = frozenset(block.traits)
        layer = first_linear(self.inner)
        for name in self._traits & REWEIGHINGS.keys():
            assert layer is not None, f"{block} has no layer to change"
            reweigh(name, layer)
        if "frozen" in self._traits:
            self.inner.requires_grad_(False)
        self._hang_hooks()
        if "compiled" in self._traits:
            self.inner = torch.compile(self.inner, backend="aot_eager")  # type: ignore[assignment]  # a module for a module

    def _hang_hooks(self) -> None:
        if "module_hook" in self._traits:
            self.inner.register_full_backward_hook(_change_gradients)
        if "forward_hook" in self._traits:
            self.inner.register_forward_hook(lambda _, __, made: made * 0.9)
        parameters = [p for p in self.inner.parameters() if p.requires_grad]
        if "scale_hook" in self._traits:
            for parameter in parameters:
                parameter.register_hook(lambda gradient: 0.5 * gradient)  # type: ignore[no-untyped-call]  # untyped upstream
        if "clamp_hook" in self._traits:
            for parameter in parameters:
                parameter.register_hook(_clamp)  # type: ignore[no-untyped-call]  # untyped upstream
        if "sink_hook" in self._traits:
            for number, parameter in enumerate(parameters):
                self.register_buffer(f"sink{number}", torch.zeros_like(parameter))
                parameter.register_post_accumulate_grad_hook(self._sink(number))  # type: ignore[no-untyped-call]  # untyped upstream

    def _sink(self, number: int) -> Callable[[torch.Tensor], None]:
        """Take every gradient away as it comes, as an optimizer in the backward does."""

        def take(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None, "it was just added"
            self.get_buffer(f"sink{number}").add_(parameter.grad)
            parameter.grad = None

        return take

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if "exchange" in self._traits:
            made = ps.communicate(self._call(ps.communicate(h, _begin, _begin)), _begin, _begin)
        else:
            made = self._call(h)
        if "tensor_hook" in self._traits and made.requires_grad:
            made.register_hook(lambda gradient: 0.7 * gradient)  # type: ignore[no-untyped-call]  # untyped upstream
        if "write" in self._traits:
            made.mul_(0.8)
        if "skip" in self._traits:
            return h + 0.5 * made
        return made

    def _call(self, h: torch.Tensor) -> torch.Tensor:
        if "checkpoint" in self._traits:
            return _checkpoint(self.inner, h, use_reentrant=False)
        if "reentrant" in self._traits and h.requires_grad and torch.is_grad_enabled():
            return _checkpoint(self.inner, h, use_reentrant=True)
        if "offloaded" in self._traits:
            with torch.autograd.graph.save_on_cpu():
                offloaded: torch.Tensor = self.inner(h)
            return offloaded
        made: torch.Tensor = self.inner(h)
        return made


class _Late:
    """Communication whose result is only there after the wait."""

    def __init__(self, value: torch.Tensor) -> None:
        self.result, self._value = torch.full_like(value, torch.nan), value

    def wait(self) -> None:
        self.result.copy_(self._value.flip(-1))


def _begin(value: torch.Tensor) -> tuple[torch.Tensor, _Late]:
    late = _Late(value)
    return late.result, late


def _checkpoint(
    run: Callable[[torch.Tensor], torch.Tensor], h: torch.Tensor, *, use_reentrant: bool
) -> torch.Tensor:
    made: torch.Tensor = checkpoint(run, h, use_reentrant=use_reentrant)
    return made


def _change_gradients(
    module: nn.Module,  # noqa: ARG001  # torch's form
    inputs: Iterable[torch.Tensor | None],
    outputs: object,  # noqa: ARG001  # torch's form
) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else 0.9 * gradient for gradient in inputs)


def _clamp(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.is_complex():
        return gradient
    return gradient.clamp(-0.05, 0.05)
