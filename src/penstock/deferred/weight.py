"""Weights that intercept the calls they are used in, to defer their gradients.

Convolutions, embeddings, attention and experts use their weights in functions of torch. While a
stage's forward runs, such a weight has its own type, so that torch passes every function that
takes it to `_intercept` below. A call that is recognised as a product (`recognised_ops.py`) gets
a node of ours (`call_nodes.py`). Any other call runs unchanged. A view of the weight (one expert
of a stack, a transposed matrix) intercepts calls too.

Calls use the weight itself, never a copy, so a call that is not intercepted is still right.
"""

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from penstock.deferred.call_nodes import run_deferred
from penstock.deferred.calls import DeferredCalls, current_recording
from penstock.deferred.products import Product
from penstock.deferred.recognised_ops import VIEWS, find_call
from penstock.torch_private import (
    DisableTorchFunctionSubclass,
    peek_interpreter_stack,
    top_saved_tensors_default_hooks,
)

__all__ = ["stop_watching", "watch_weights"]

# Used in every call, where each look-up of an attribute takes a good part of the time.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_Tensor, _strided = torch.Tensor, torch.strided
_attention: Any = F.multi_head_attention_forward
_attention_dispatches = "has_torch_function" in _attention.__code__.co_names


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
        weight = None if product is None else _find_weight(product)
        if product is not None and weight is not None:
            calls.products.add(weight)
            return run_deferred(calls, product, weight, function, args, kwargs)
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


def _find_weight(product: Product) -> torch.Tensor | None:
    """Return the weight, if autograd would only save the inputs and compute one product."""
    shown = product[0]
    for value in product[1]:
        if type(value) is not _Tensor or value.layout is not _strided or value.is_nested:
            return None
    weight = shown._base if type(shown) is _DeferredView else shown
    if (
        type(weight) is _DeferredWeight
        and weight.requires_grad
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and _is_grad_enabled()
        # Checkpoints and offloading must not have their inputs kept alive, and tensors inside a
        # transform of `torch.func` are wrappers.
        and top_saved_tensors_default_hooks(True) is None
        and peek_interpreter_stack() is None
    ):
        return weight
    return None


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
