"""The autograd nodes of deferred calls: what they do in the stage's own pass, and in any other.

A product whose operand we can differentiate ourselves is one node. Any other runs with its weight
as a constant, followed by a node ("tap") that has the weight in its graph:

    x, weight --- whole --- y                            own pass: y to x
    x ---------- product(x, constant) --- tap --- y      own pass: y to product to x
    x, weight ---------------------------/

In the own pass both defer the weight's gradient. In any other pass they pass gradients to all
their inputs, including the weight, as autograd computes them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.deferred.calls import CastTo, DeferredCalls, current_cast
from penstock.deferred.own_pass import pass_number, work_of
from penstock.deferred.plain_derivative import run_again
from penstock.deferred.products import Product
from penstock.deferred.work import WeightPart, require_unchanged
from penstock.torch_private import is_any_autocast_enabled

__all__ = ["FunctionCall", "run_deferred"]

_Tensor = torch.Tensor


class FunctionCall(NamedTuple):
    """One call of a function whose weight gradient is deferred.

    `shown` is the weight, or a view of it without its graph. `kept` are the tensors that `add`
    needs beside the gradient of the output, each with its version.
    """

    weight: nn.Parameter
    shown: torch.Tensor
    kept: list[tuple[torch.Tensor, int]]
    add: Callable[..., None]
    gradient: torch.Tensor

    def finish(self) -> None:
        """Compute the weight's gradient and add it."""
        weight, shown, kept, add, gradient = self
        for value, version in kept:
            if value._version != version:
                require_unchanged(value, version, value.shape)
        add(WeightPart(weight, shown), gradient, *[value for value, _ in kept])


# Makes a `FunctionCall` of a tuple without a call of a Python function.
_new_call: Any = partial(tuple.__new__, FunctionCall)


class _Original(NamedTuple):
    """A call as it was made, to differentiate it as autograd would.

    `places` are the places of the arguments that require a gradient.
    """

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    cast: CastTo | None
    places: Sequence[int]
    weight: torch.Tensor
    version: int

    def differentiate(
        self, needs: Sequence[bool], gradient: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the arguments at `places`."""
        function, args, kwargs, cast, places, weight, version = self
        require_unchanged(weight, version, weight.shape)
        needed = dict(zip(places, needs, strict=True))
        needs_all = [needed.get(place, False) for place in range(len(args) + len(kwargs))]
        cast = cast or CastTo(gradient.device.type, None)
        found = run_again(function, args, kwargs, needs_all, gradient, cast)
        return [found[place] for place in places]


_new_original: Any = partial(tuple.__new__, _Original)


class _Tap(torch.autograd.Function):
    """A node after a call that ran with its weight as a constant, with the real inputs.

    Only inputs that require a gradient are arguments, because each takes time both ways.
    """

    @staticmethod
    def forward(
        ctx: Any, call: tuple[Any, ...], output: torch.Tensor, *_given: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
        weight, shown, kept, add, nothing, original = ctx.call
        for value, version in kept:
            if value._version != version:
                require_unchanged(value, version, value.shape)
        work = work_of(pass_number())
        if work is None or weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return None, None, *original.differentiate(ctx.needs_input_grad[2:], gradient)
        work.append(_new_call((weight, shown, kept, add, gradient)))
        return None, gradient, *nothing


class _Whole(torch.autograd.Function):
    """A product as one node, with the inputs that require a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        calls: DeferredCalls,
        product: Product,
        call: tuple[Any, ...],
        *_given: torch.Tensor,
    ) -> torch.Tensor:
        function, args, kwargs, cast, *_ = call[0]
        if cast is not None:
            # Autocast caches casts of parameters, and a cast made here has no graph.
            args = [v.detach() if isinstance(v, _Tensor) else v for v in args]
            kwargs = {k: v.detach() if isinstance(v, _Tensor) else v for k, v in kwargs.items()}
        output: torch.Tensor = function(*args, **kwargs) if kwargs else function(*args)
        if output._is_view():
            # Autograd forbids writing to a view that a custom function returns.
            output = output.detach()
        _, inputs, add, pull = product
        ctx.call = *call, _keep(calls, inputs, output.dtype), add, pull
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
        original, weight, shown, roles, kept, add, pull = ctx.call
        for value, version in kept:
            if value._version != version:
                require_unchanged(value, version, value.shape)
        if weight._version != original[-1]:
            require_unchanged(weight, original[-1], weight.shape)
        work = work_of(pass_number())
        if work is None or weight._backward_hooks or weight._post_accumulate_grad_hooks:
            needs = ctx.needs_input_grad[3:]
            return None, None, None, *original.differentiate(needs, gradient)
        work.append(_new_call((weight, shown, kept, add, gradient)))
        if len(roles) == 1:
            return None, None, None, None
        if shown.dtype is not gradient.dtype:
            shown = shown.to(gradient.dtype)
        of_value, of_rest = pull(gradient, shown, kept[0][0], _VALUE in roles, _REST in roles)
        found = None, of_value, of_rest
        return None, None, None, *[found[role] for role in roles]


# What an input of `_Whole` is to the product: its weight, its other operand, or what it adds.
_WEIGHT, _VALUE, _REST = range(3)
# The nodes' `apply` without its support of `torch.func`, inside which no call is deferred; and the
# function that autograd calls in a pass: by default it looks up `backward` each time.
_tap: Any = super(torch.autograd.Function, _Tap).apply
_run_whole: Any = super(torch.autograd.Function, _Whole).apply
_Tap._backward_cls.apply = _Tap.backward  # type: ignore[attr-defined]  # made by its metaclass
_Whole._backward_cls.apply = _Whole.backward  # type: ignore[attr-defined]  # as above


def run_deferred(
    calls: DeferredCalls,
    product: Product,
    weight: torch.Tensor,
    function: Callable[..., torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Run a call that is a product with a weight, or with a view of it; defer its gradient."""
    shown, inputs, _, pull = product
    value = inputs[0]
    places, roles, given = [], [], []
    for place, argument in enumerate((*args, *kwargs.values()) if kwargs else args):
        if isinstance(argument, _Tensor) and argument.requires_grad:
            places.append(place)
            given.append(argument)
            roles.append(_WEIGHT if argument is shown else _VALUE if argument is value else _REST)
    cast = current_cast(value.device.type) if is_any_autocast_enabled() else None
    original = _new_original((function, args, kwargs, cast, places, weight, weight._version))
    if pull is None and len(given) > 1:
        return _run_tapped(calls, product, original, given)
    constant = weight if shown is weight else shown.detach()
    output: torch.Tensor = _run_whole(calls, product, (original, weight, constant, roles), *given)
    return output


def _run_tapped(
    calls: DeferredCalls, product: Product, original: _Original, given: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Run a call with its weight as a constant, and a tap behind it."""
    function, args, kwargs, _, _, weight, _ = original
    shown, inputs, add, _ = product
    constant = shown.detach()
    constants = [constant if value is shown else value for value in args]
    if kwargs:
        named = {name: constant if value is shown else value for name, value in kwargs.items()}
        output = function(*constants, **named)
    else:
        output = function(*constants)
    call = (
        weight,
        weight if shown is weight else constant,
        _keep(calls, inputs, output.dtype),
        add,
        (None,) * len(given),
        original,
    )
    tapped: torch.Tensor = _tap(call, output, *given)
    return tapped


def _keep(
    calls: DeferredCalls, inputs: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[tuple[torch.Tensor, int]]:
    """Return what a product needs later, each with its version."""
    kept = []
    for value in inputs:
        same = calls.keep(value, dtype if value.is_floating_point() else value.dtype)
        kept.append((same, same._version))
    return kept
