"""Calling a loss function once more, without side effects."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.loss.calls import LossCall, LossObserver
from penstock.loss.contract import require_number
from penstock.modules.compiled import run_eagerly
from penstock.tensors.output_tree import fill, tensors_of
from penstock.torch_private import tree_leaves, tree_map

__all__ = ["LossMade", "MadeAgain", "as_leaves", "copy_tensors", "run_again", "versions_of"]


def as_leaves(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a copy of an output whose tensors are leaves of a new graph, and these leaves."""
    # A tensor made in inference mode cannot be a leaf.
    values = [
        tensor.clone() if tensor.is_inference() else tensor.detach()
        for tensor in tensors_of(output)
    ]
    leaves = [
        value.requires_grad_(value.is_floating_point() or value.is_complex()) for value in values
    ]
    return fill(output, leaves), leaves


def copy_tensors(value: Any, known: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return a value with copies of its tensors, since a loss may write to its arguments.

    `known` has the tensors that were copied already, by id, and keeps them alive.
    """

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in known:
            with torch.inference_mode(mode=False), torch.no_grad():
                known[id(leaf)] = leaf, leaf.detach().clone()
        return known[id(leaf)][1]

    return tree_map(copy, value)


@dataclass(frozen=True, slots=True, eq=False)
class MadeAgain:
    """A loss that was computed once more, and the calls of torch's losses in it."""

    loss: torch.Tensor
    calls: list[LossCall]


class LossMade(NamedTuple):
    """A call of the loss function, and the versions of its tensors before the call."""

    function: Callable[..., Any]
    output: Any
    target: Any
    versions: list[int]

    def repeat(self) -> Any:
        """Call the loss function with these arguments."""
        return self.function(self.output, self.target)

    def repeat_with_graph(self, loss: torch.Tensor) -> MadeAgain | None:
        """Compute a loss once more with a graph, which shows what it consists of.

        Return None if that fails or gives another number.
        """
        observer = LossObserver(is_safe=True)
        try:
            with run_again(self.function, tensors_of(self.output)), observer:
                output, target = as_leaves(self.output)[0], copy_tensors(self.target, {})
                again = require_number(self.function(output, target))
        except Exception:
            # A loss need not support that, and has worked without it.
            return None
        is_same = torch.allclose(again.detach().double(), loss.double(), equal_nan=True)
        return MadeAgain(again, observer.calls) if is_same and again.requires_grad else None

    def can_be_repeated(self) -> bool:
        """Whether the first call had no side effects: nothing written, no gradients taken."""
        if self.versions != versions_of(self.output, self.target):
            return False
        try:
            tensors = tensors_of(self.output)
            with run_again(self.function, tensors), torch.no_grad():
                copies = [tensor.detach().clone() for tensor in tensors]
                self.function(fill(self.output, copies), copy_tensors(self.target, {}))
        except Exception:
            # Without a graph, a loss that takes gradients fails.
            return False
        return True


def versions_of(output: Any, target: Any) -> list[int]:
    """Return the versions of the tensors that a loss function is called with."""
    is_plain = type(output) is torch.Tensor and type(target) is torch.Tensor
    if is_plain and not (output.is_inference() or target.is_inference()):
        return [output._version, target._version]
    leaves = [leaf for leaf in tree_leaves((output, target)) if isinstance(leaf, torch.Tensor)]
    return [leaf._version for leaf in leaves if not leaf.is_inference()]


@contextmanager
def run_again(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Record graphs, and restore random states and the buffers of a loss's modules afterwards.

    The loss runs on the devices of `tensors`. Compiled code runs eagerly, because other sizes
    would have to be compiled again.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    buffers = [buffer for module in _find_modules(function) for buffer in module.buffers()]
    with ExitStack() as stack:
        for kind in {device.type for device in devices} or {"cuda"}:
            indices = [device.index or 0 for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(indices, device_type=kind))
        stack.enter_context(run_eagerly())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        before = [buffer.detach().clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


def _find_modules(function: object, depth: int = 3) -> Iterator[nn.Module]:
    """Yield the modules that a loss function is, or that it refers to directly."""
    match function:
        case nn.Module():
            yield function
            return
        case partial():
            held = [function.func, *function.args, *function.keywords.values()]
        case _:
            held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
            held.append(getattr(function, "__self__", None))
    for value in held if depth else ():
        if callable(value):
            yield from _find_modules(value, depth - 1)
