"""Weights that see the calls they are used in, while a stage is recorded.

A convolution, an embedding, attention or experts use their weights in functions of torch. While a
stage's forward runs, such a weight has a type of its own, so that torch hands every function that
takes it to `_run` below. What is recognised as a product (`product_calls.py`) runs with the weight
as a constant and leaves its gradient for later; anything else runs as it is. A view of the weight
(one expert of a stack, a transposed matrix) is watched in the same way.

The weight itself is what is used, never a copy, so nothing is lost by not looking.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from penstock.runtime.product_calls import VIEWS, find_call
from penstock.runtime.products import Product
from penstock.runtime.recording import Recording, current_recording, is_plain_place
from penstock.runtime.weight_work import WeightPart, require_unchanged

__all__ = ["FunctionCall", "watch_weights"]

# Used in every call: a look-up by one name is a good part of what they cost.
_as_it_is = torch._C.DisableTorchFunctionSubclass
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_Tensor = torch.Tensor
_attention: Any = F.multi_head_attention_forward
_attention_asks = "has_torch_function" in _attention.__code__.co_names


class FunctionCall(list[torch.Tensor | None]):
    """One call of a function whose weight gradient waits: a list for its output's gradient."""

    __slots__ = ("_add", "_constant", "_shape", "_versions", "kept", "weight")

    def __init__(
        self,
        weight: nn.Parameter,
        constant: torch.Tensor,
        kept: list[torch.Tensor],
        add: Callable[..., None],
        shape: torch.Size,
    ) -> None:
        self.weight, self.kept = weight, kept
        self._constant, self._add, self._shape = constant, add, shape
        self._versions = [value._version for value in kept]

    def finish(self) -> None:
        """Make the weight's gradient, as the function does it, and add it."""
        for value, version in zip(self.kept, self._versions, strict=True):
            if value._version != version:
                require_unchanged(value, version, value.shape)
        gradient = self[0]
        if gradient is not None:
            if gradient.shape != self._shape:
                gradient = gradient.reshape(self._shape)
            self._add(WeightPart(self.weight, self._constant), gradient, *self.kept)


class _WatchedWeight(nn.Parameter):
    """A weight while it is watched."""

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _run(function, args, kwargs or {})


class _WatchedView(torch.Tensor):
    """A view of a watched weight."""

    __torch_function__ = _WatchedWeight.__torch_function__


_WATCHED = (_WatchedWeight, _WatchedView)


@contextmanager
def watch_weights(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let weights see the calls they are used in meanwhile."""
    watched = [weight for weight in weights if type(weight) is nn.Parameter]
    for weight in watched:
        weight.__class__ = _WatchedWeight
    try:
        yield
    finally:
        for weight in watched:
            weight.__class__ = nn.Parameter


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recording = None if _is_compiling() else current_recording.get()
    if recording is not None and function is _attention and _attention_asks:
        return _unasked(function)(*args, **kwargs)
    with _as_it_is():
        if recording is None:
            return function(*args, **kwargs)
        product = find_call(function, args, kwargs)
        if product is not None:
            return _run_product(recording, product, function, args, kwargs)
        made = function(*args, **kwargs)
        return _watch_views(recording, made) if function in VIEWS else made


def _run_product(
    recording: Recording,
    product: Product,
    function: Callable[..., torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Run a call with its weight as a constant, if its gradient can wait, or else as it is."""
    shown, kept, add = product
    base = shown._base
    weight: Any = shown if base is None else base
    if not _can_wait(weight, kept) or type(shown) not in _WATCHED:
        return function(*args, **kwargs)
    if id(weight) not in recording.constants:
        output = function(*args, **kwargs)
        if _has_gradient_in_order(output):
            recording.judge_later(weight, output)
        return output
    constant = shown.detach()
    constants = [constant if value is shown else value for value in args]
    if kwargs:
        named = {name: constant if value is shown else value for name, value in kwargs.items()}
        output = function(*constants, **named)
    else:
        output = function(*constants)
    if not _has_gradient_in_order(output):
        return function(*args, **kwargs)
    if not output.requires_grad:
        output = recording.anchor(output, weight)
    values = [recording.keep(v, output.dtype if v.is_floating_point() else v.dtype) for v in kept]
    recording.wait_for(FunctionCall(weight, constant, values, add, output.shape), output)
    return output


def _can_wait(weight: torch.Tensor, kept: Iterable[torch.Tensor]) -> bool:
    """Whether autograd would do nothing here but save the inputs and make one product of them."""
    for value in kept:
        if type(value) is not _Tensor:
            return False
    return (
        _is_grad_enabled()
        and weight.requires_grad
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and is_plain_place()
    )


def _has_gradient_in_order(output: torch.Tensor) -> bool:
    """Whether the gradient that we take, of what an output is a view of, need only be reshaped."""
    base = output._base
    return base is None or (
        output.is_contiguous() and base.is_contiguous() and output.numel() == base.numel()
    )


def _watch_views(recording: Recording, made: Any) -> Any:
    """Let what are views of a weight, and not copies, be watched as well."""
    for view in made if isinstance(made, tuple | list) else (made,):
        weight = view._base
        if type(weight) is _WatchedWeight and weight.is_contiguous() and view.requires_grad:
            recording.note_view(view.grad_fn, weight)
            view.__class__ = _WatchedView
    return made


def _unasked(function: Any) -> Any:
    """A function of torch's Python code, without its question whether its arguments see to it.

    So its inner calls are seen.
    """
    known = {**function.__globals__, "has_torch_function": lambda _: False}
    inner = FunctionType(
        function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    )
    inner.__kwdefaults__ = function.__kwdefaults__
    return inner
