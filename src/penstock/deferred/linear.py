"""Plain linear layers in a stage that splits its backward.

Recording comes on top of every forward, and linear layers are most of what there is, so the path
of a call that is deferred is short: looked-up answers in place of questions.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from penstock.deferred.calls import CastTo, DeferredCalls, current_cast, current_recording
from penstock.deferred.own_pass import pass_number, work_of
from penstock.deferred.plain_derivative import run_again
from penstock.deferred.work import add_product, require_unchanged

__all__ = ["DeferredLinear", "LayerCall"]

# Asked for every layer: a look-up by one name is a good part of what the question costs.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_functorch_stack = torch._C._functorch.peek_interpreter_stack
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_Parameter, _Tensor, _strided = nn.Parameter, torch.Tensor, torch.strided


class LayerCall(NamedTuple):
    """One call of a linear layer whose weight gradient is deferred.

    It has the layer's input, as a matrix if that takes no copy, and the gradient of its output,
    which has the same dtype.
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
            columns = _as_matrix(value)
            if columns.is_complex():
                columns = columns.conj()
            add_product(weight, _as_matrix(gradient).t(), columns)
        elif gradient.dim() == 2:
            total.addmm_(gradient.t(), value)
        else:
            # A reshape and a transposition in one.
            width = total.shape[0]
            total.addmm_(gradient.as_strided((width, value.shape[0]), (1, width)), value)


# `LayerCall(...)` of a tuple, without a Python function in between.
_new_call: Any = partial(tuple.__new__, LayerCall)


class _Product(torch.autograd.Function):
    """A linear layer; in the stage's own pass it leaves its weight for later."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        recording: DeferredCalls,
    ) -> torch.Tensor:
        cast = None
        if _is_any_autocast_enabled():
            cast = current_cast(value.device.type)
            # Autocast remembers casts of parameters, and this one has no graph.
            output = F.linear(value, weight.detach(), None if bias is None else bias.detach())
        else:
            output = F.linear(value, weight, bias)
        if output._is_view():
            # Autograd lets nobody write to a view that a function of ours returns.
            output = output.detach()
        kept = recording.last_matrix
        if kept is None or value is not recording.last_input or kept.dtype is not output.dtype:
            kept = recording.keep_matrix(value, output.dtype)
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
            of_value = gradient.mm(factor) if gradient.dim() == 2 else gradient.matmul(factor)
        # Autograd sums what is larger than the bias over the rows, as it does for its own nodes.
        return of_value, None, gradient if needs_bias else None, None


# `_Product.apply` without its preparations for `torch.func`, in which no call is deferred.
_run_product: Any = super(torch.autograd.Function, _Product).apply
# What autograd calls in a pass; torch looks up `backward` each time.
_Product._backward_cls.apply = _Product.backward  # type: ignore[attr-defined]  # made by its metaclass


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


class DeferredLinear(nn.Linear):
    """A linear layer of a stage that splits its backward; outside a step it is a plain one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # nn.Linear's own name
        """Run the layer; in a recorded forward its weight gradient may be deferred."""
        recording = None if _is_compiling() else current_recording.get()
        # The same as `self.weight`, without a Python function in between; a weight that is
        # normed, pruned or parametrized is not there.
        parameters = self._parameters
        weight = parameters.get("weight")
        if (
            recording is None
            # A weight that is watched itself is a matter of its own.
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
            or _saved_tensors_hooks(True) is not None
            or _functorch_stack() is not None
            or _is_wrapped(input)
        ):
            return F.linear(input, self.weight, self.bias)
        output: torch.Tensor = _run_product(input, weight, parameters["bias"], recording)
        return output
