"""Plain linear layers in a stage that splits its backward.

Most weights belong to linear layers, and deferring adds to the time of every forward. So a call
that is deferred takes a short path, with few checks and little Python.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from penstock.deferred.calls import CastTo, DeferredCalls, current_cast, current_recording
from penstock.deferred.layout import as_matrix, lies_by_columns, multiply_by_columns
from penstock.deferred.own_pass import pass_number, work_of
from penstock.deferred.plain_derivative import run_again
from penstock.deferred.work import add_product, require_unchanged
from penstock.torch_private import (
    is_any_autocast_enabled,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
    top_saved_tensors_default_hooks,
)

__all__ = ["DeferredLinear", "LayerCall", "held_by", "hold"]

# Checked in every call, where each look-up of an attribute takes a good part of the time.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_Parameter, _Tensor, _strided = nn.Parameter, torch.Tensor, torch.strided
_linear, _mm = F.linear, torch.mm


class LayerCall(NamedTuple):
    """One call of a linear layer whose weight gradient is deferred.

    `value` is the layer's input, as a matrix if that takes no copy. `gradient` is that of the
    layer's output, in the same dtype.
    """

    weight: nn.Parameter
    value: torch.Tensor
    version: int
    gradient: torch.Tensor

    def finish(self) -> None:
        """Add the product of gradient and input to the weight's gradient."""
        weight, value, version, gradient = self
        if value._version != version:
            require_unchanged(value, version, value.shape)
        total = weight.grad
        if (
            total is None
            or total.dtype is not value.dtype
            or value.dim() != 2
            or total.is_complex()
            or not gradient.is_contiguous()
        ):
            columns = as_matrix(value)
            if columns.is_complex():
                columns = columns.conj()
            add_product(weight, as_matrix(gradient).t(), columns)
        elif gradient.dim() == 2:
            total.addmm_(gradient.t(), value)
        else:
            # Reshape and transpose at once.
            width = total.shape[0]
            total.addmm_(gradient.as_strided((width, value.shape[0]), (1, width)), value)


# Makes a `LayerCall` of a tuple without a call of a Python function.
_new_call: Any = partial(tuple.__new__, LayerCall)


class _Product(torch.autograd.Function):
    """A linear layer that defers its weight gradient in the stage's own backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        calls: DeferredCalls,
    ) -> torch.Tensor:
        cast = None
        if is_any_autocast_enabled():
            cast = current_cast(value.device.type)
            # Autocast caches casts of parameters, and a cast made here has no graph.
            output = F.linear(value, weight.detach(), None if bias is None else bias.detach())
        else:
            output = _linear(value, weight, bias)
        if output._is_view():
            # Autograd forbids writing to a view that a custom function returns.
            output = output.detach()
        kept = calls.last_matrix
        if kept is None or value is not calls.last_input or kept.dtype is not output.dtype:
            kept = calls.keep_matrix(value, output.dtype)
        ctx.call = value, weight, bias, cast, kept, kept._version, weight._version
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, weight, bias, cast, kept, version, weight_version = ctx.call
        if kept._version != version or weight._version != weight_version:
            require_unchanged(kept, version, kept.shape)
            require_unchanged(weight, weight_version, weight.shape)
        needs_value, _, needs_bias, _ = needs = ctx.needs_input_grad
        work = work_of(pass_number())
        if work is None or weight._backward_hooks or weight._post_accumulate_grad_hooks:
            cast = cast or CastTo(gradient.device.type, None)
            inputs = value, weight, bias
            return *run_again(F.linear, inputs, {}, needs[:3], gradient, cast), None
        work.append(_new_call((weight, kept, version, gradient)))
        of_value = None
        if needs_value:
            factor = weight if weight.dtype is gradient.dtype else weight.to(gradient.dtype)
            if factor.is_complex():
                factor = factor.conj()
            if not kept.is_contiguous() and lies_by_columns(kept):
                of_value = multiply_by_columns(gradient, factor)
            else:
                is_matrix = gradient.dim() == 2
                of_value = _mm(gradient, factor) if is_matrix else gradient.matmul(factor)
        # Autograd sums a gradient that is larger than the bias over the rows.
        return of_value, None, gradient if needs_bias else None, None


# `_Product.apply` without its support of `torch.func`, inside which no call is deferred.
_run_product: Any = super(torch.autograd.Function, _Product).apply
# The function that autograd calls in a pass; by default it looks up `backward` each time.
_Product._backward_cls.apply = _Product.backward  # type: ignore[attr-defined]  # made by its metaclass


def held_by(node: object) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the input that a node of ours holds, and its matrix; None for any other node."""
    if not isinstance(node, _Product._backward_cls):
        return None
    call = node.call  # type: ignore[attr-defined]  # set by `forward`
    return call[0], call[4]


def hold(node: object, value: torch.Tensor | None, matrix: torch.Tensor | None) -> None:
    """Let a node of ours hold another copy of the same input and matrix, or none for a while."""
    _, weight, bias, cast, _, _, version = node.call  # type: ignore[attr-defined]  # set by `forward`
    kept = 0 if matrix is None else matrix._version
    node.call = value, weight, bias, cast, matrix, kept, version  # type: ignore[attr-defined]  # as above


class DeferredLinear(nn.Linear):
    """A linear layer of a stage that splits its backward; outside a step it is a plain layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # nn.Linear's own name
        """Run the layer; in a training step its weight gradient may be deferred."""
        calls = None if _is_compiling() else current_recording.get()
        # Faster than `self.weight`; a normed, pruned or parametrized weight is missing here.
        parameters = self._parameters
        weight = parameters.get("weight")
        if (
            calls is None
            # A weight of another type defers its calls itself.
            or type(weight) is not _Parameter
            or "bias" not in parameters
            or not weight.requires_grad
            or type(input) is not _Tensor
            or input.layout is not _strided
            or input.dim() < 2
            or input.is_nested
            or weight._backward_hooks
            or weight._post_accumulate_grad_hooks
            or not _is_grad_enabled()
            or top_saved_tensors_default_hooks(True) is not None
            or peek_interpreter_stack() is not None
            or is_functorch_wrapped_tensor(input)
        ):
            return F.linear(input, self.weight, self.bias)
        output: torch.Tensor = _run_product(input, weight, parameters["bias"], calls)
        return output
