"""Weights that intercept the calls they are used in, to defer their gradients.

Convolutions, embeddings, attention and experts use their weights in functions of torch. While a
stage's forward runs, such a weight has its own type, so that torch passes every function that
takes it to `_run` below. A call that is recognised as a product (`recognised_ops.py`) runs with
the weight as a constant, followed by a node ("tap") that has the weight in its graph. Any other
call runs unchanged. A view of the weight (one expert of a stack, a transposed matrix) intercepts
calls too.

    x ---------- product(x, constant) --- tap --- y      own pass: y to product to x
    x, weight ---------------------------/               any other pass: y to x and weight

Calls use the weight itself, never a copy, so a call that is not intercepted is still right.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from penstock.deferred.calls import CastTo, DeferredCalls, current_cast, current_recording
from penstock.deferred.own_pass import pass_number, work_of
from penstock.deferred.plain_derivative import run_again
from penstock.deferred.products import Product
from penstock.deferred.recognised_ops import VIEWS, find_call
from penstock.deferred.work import WeightPart, require_unchanged
from penstock.torch_private import (
    DisableTorchFunctionSubclass,
    is_any_autocast_enabled,
    peek_interpreter_stack,
    top_saved_tensors_default_hooks,
)

__all__ = ["FunctionCall", "stop_watching", "watch_weights"]

# Used in every call, where each look-up of an attribute takes a good part of the time.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_Tensor, _strided = torch.Tensor, torch.strided
_attention: Any = F.multi_head_attention_forward
_attention_dispatches = "has_torch_function" in _attention.__code__.co_names


class FunctionCall(NamedTuple):
    """One call of a function whose weight gradient is deferred.

    `constant` is the weight, or a view of it, without its graph. `kept` are the tensors that
    `add` needs beside the gradient of the output, each with its version.
    """

    weight: nn.Parameter
    constant: torch.Tensor
    kept: list[tuple[torch.Tensor, int]]
    add: Callable[..., None]
    gradient: torch.Tensor

    def finish(self) -> None:
        """Compute the weight's gradient and add it."""
        weight, constant, kept, add, gradient = self
        for value, version in kept:
            if value._version != version:
                require_unchanged(value, version, value.shape)
        add(WeightPart(weight, constant), gradient, *[value for value, _ in kept])


# Makes a `FunctionCall` of a tuple without a call of a Python function.
_new_call: Any = partial(tuple.__new__, FunctionCall)


class _Tap(torch.autograd.Function):
    """A node after a call that ran with its weight as a constant, with the real inputs.

    In the stage's own pass it passes the gradient to that call, and defers that of the weight. In
    any other pass it passes gradients to the real inputs, including the weight. Only inputs that
    require a gradient are arguments, because each argument takes time in both directions.
    """

    @staticmethod
    def forward(
        ctx: Any, call: tuple[Any, ...], output: torch.Tensor, *_given: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
        weight, constant, kept, add, original = ctx.call
        for value, version in kept:
            if value._version != version:
                require_unchanged(value, version, value.shape)
        needs = ctx.needs_input_grad
        work = work_of(pass_number())
        if work is None or weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return None, None, *_differentiate(original, needs[2:], gradient)
        work.append(_new_call((weight, constant, kept, add, gradient)))
        return None, gradient if needs[1] else None, *(None,) * (len(needs) - 2)


def _differentiate(
    original: tuple[Any, ...], needs: Sequence[bool], gradient: torch.Tensor
) -> list[torch.Tensor | None]:
    """Differentiate a call with its real weight, with respect to the inputs of the tap."""
    function, args, kwargs, cast, places = original
    needed = dict(zip(places, needs, strict=True))
    needs_all = [needed.get(place, False) for place in range(len(args) + len(kwargs))]
    cast = cast or CastTo(gradient.device.type, None)
    found = run_again(function, args, kwargs, needs_all, gradient, cast)
    return [found[place] for place in places]


# `_Tap.apply` without its support of `torch.func`, inside which no call is deferred; and the
# function that autograd calls in a pass, where by default it looks up `backward` each time.
_tap: Any = super(torch.autograd.Function, _Tap).apply
_Tap._backward_cls.apply = _Tap.backward  # type: ignore[attr-defined]  # made by its metaclass


def _intercept(
    _cls: type[torch.Tensor],
    function: Any,
    _types: object,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a call that takes a deferred weight; defer the weight's gradient if that is possible."""
    calls = None if _is_compiling() else current_recording.get()
    kwargs = kwargs or {}
    if calls is not None and function is _attention and _attention_dispatches:
        return _without_dispatch(function)(*args, **kwargs)
    with DisableTorchFunctionSubclass():
        if calls is None:
            return function(*args, **kwargs)
        product = find_call(function, args, kwargs)
        if product is not None and _can_be_deferred(product):
            return _run_product(calls, product, function, args, kwargs)
        _note_use(calls, args)
        result = function(*args, **kwargs)
        return _defer_views(result) if product is None and function in VIEWS else result


class _DeferredWeight(nn.Parameter):
    """A weight while it intercepts calls."""

    __torch_function__ = classmethod(_intercept)


class _DeferredView(torch.Tensor):
    """A view of a deferred weight, which intercepts calls too."""

    __torch_function__ = classmethod(_intercept)


_DEFERRED = (_DeferredWeight, _DeferredView)


def watch_weights(weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Let weights intercept the calls they are used in; return those that do so from now on."""
    plain = [weight for weight in weights if type(weight) is nn.Parameter]
    for weight in plain:
        weight.__class__ = _DeferredWeight
    return plain


def stop_watching(weights: Iterable[nn.Parameter]) -> None:
    """Make weights plain again."""
    for weight in weights:
        weight.__class__ = nn.Parameter


def _note_use(calls: DeferredCalls, args: tuple[Any, ...]) -> None:
    """Note the weights that were used in a call that cannot be deferred."""
    for value in args:
        if type(value) is _DeferredWeight:
            calls.used.add(value)


def _can_be_deferred(product: Product) -> bool:
    """Whether autograd would only save the inputs here, and compute one product from them."""
    shown, kept, _ = product
    for value in kept:
        if type(value) is not _Tensor or value.layout is not _strided or value.is_nested:
            return False
    weight = shown._base if type(shown) is _DeferredView else shown
    return (
        type(weight) is _DeferredWeight
        and weight.requires_grad
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and _is_grad_enabled()
        # Checkpoints and offloading must not have their inputs kept alive, and tensors inside a
        # transform of `torch.func` are wrappers.
        and top_saved_tensors_default_hooks(True) is None
        and peek_interpreter_stack() is None
    )


def _run_product(
    calls: DeferredCalls,
    product: Product,
    function: Callable[..., torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Run a call with its weight as a constant."""
    shown, inputs, add = product
    weight: Any = shown._base if type(shown) is _DeferredView else shown
    calls.products.add(weight)
    constant = shown.detach()
    constants = [constant if value is shown else value for value in args]
    if kwargs:
        named = {name: constant if value is shown else value for name, value in kwargs.items()}
        output = function(*constants, **named)
    else:
        output = function(*constants)
    dtype = output.dtype
    kept = []
    for value in inputs:
        same = calls.keep(value, dtype if value.is_floating_point() else value.dtype)
        kept.append((same, same._version))
    places, given = [], []
    for place, value in enumerate((*args, *kwargs.values()) if kwargs else args):
        if isinstance(value, _Tensor) and value.requires_grad:
            places.append(place)
            given.append(value)
    cast = current_cast(output.device.type) if is_any_autocast_enabled() else None
    original = function, args, kwargs, cast, places
    tapped: torch.Tensor = _tap((weight, constant, kept, add, original), output, *given)
    return tapped


def _defer_views(result: Any) -> Any:
    """Let views of a weight, but not copies, intercept calls too."""
    for view in result if isinstance(result, tuple | list) else (result,):
        weight = view._base
        if type(weight) is _DeferredWeight and weight.is_contiguous() and view.requires_grad:
            view.__class__ = _DeferredView
    return result


def _without_dispatch(function: Any) -> Any:
    """Return a Python function of torch that does not dispatch to its arguments.

    The functions that it calls do, so that they are intercepted one by one.
    """
    known = {**function.__globals__, "has_torch_function": lambda _: False}
    inner = FunctionType(
        function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    )
    inner.__kwdefaults__ = function.__kwdefaults__
    return inner
