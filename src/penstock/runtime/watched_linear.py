"""Plain linear layers in a stage that splits its backward.

Recording comes on top of every forward, and linear layers are most of what there is, so the path
of a call that waits is one function: looked-up answers in place of questions.
"""

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from penstock.runtime.recording import OutputHooks, Recording, current_recording, is_plain_place
from penstock.runtime.weight_work import add_product, require_unchanged

__all__ = ["LayerCall", "WatchedLinear"]

# Asked for every layer: a look-up by one name is a good part of what the question costs.
_is_compiling = torch.compiler.is_dynamo_compiling
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_functorch_stack = torch._C._functorch.peek_interpreter_stack
_Parameter, _Tensor = nn.Parameter, torch.Tensor


class LayerCall(list[torch.Tensor | None]):
    """One call of a linear layer whose weight gradient waits: its input, its output's gradient.

    Its fields are set by whoever makes one, which is faster than a constructor in Python.
    """

    __slots__ = ("value", "version", "weight")

    weight: nn.Parameter
    value: torch.Tensor
    version: int

    def finish(self) -> None:
        """Add the product of gradient and input to the weight's gradient."""
        value, gradient, total = self.value, self[0], self.weight.grad
        if value._version != self.version:
            require_unchanged(value, self.version, value.shape)
        if gradient is None:
            return
        if (
            total is None
            or total.dtype is not gradient.dtype
            or total.dtype is not value.dtype
            or value.dim() != 2
            or not gradient.is_contiguous()
            or total.is_complex()
        ):
            self._add_any(value, gradient)
        else:
            # A reshape and a transposition in one.
            width = total.shape[0]
            total.addmm_(gradient.as_strided((width, value.shape[0]), (1, width)), value)

    def _add_any(self, value: torch.Tensor, gradient: torch.Tensor) -> None:
        columns = _as_matrix(value)
        if columns.is_complex():
            columns = columns.conj()
        add_product(self.weight, _as_matrix(gradient).t(), columns)


class WatchedLinear(nn.Linear):
    """A linear layer of a stage that splits its backward; outside a step it is a plain one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # nn.Linear's own name
        """Run the layer, with its weight as a constant if it is recorded and can wait."""
        recording = None if _is_compiling() else current_recording.get()
        if recording is None:
            return F.linear(input, self.weight, self.bias)
        # The same as `self.weight`, without a Python function in between.
        parameters = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        known = recording.constants.get(id(weight))
        if (
            known is None
            # A weight that is watched itself is a matter of its own.
            or type(weight) is not _Parameter
            or not weight.requires_grad
            or type(input) is not _Tensor
            or weight._backward_hooks
            or weight._post_accumulate_grad_hooks
            or _saved_tensors_hooks(True) is not None
            or _functorch_stack() is not None
        ):
            return _run_unknown(recording, weight, bias, input)
        constant = known.value
        if known.address != weight.data_ptr():
            # Somebody has given it other memory.
            constant = recording.constants.add(weight)
        output = F.linear(input, constant, bias)
        if not output.requires_grad:
            if not torch.is_grad_enabled():
                return output
            output = recording.anchor(output, weight)
        kept = recording.last_matrix
        if kept is None or input is not recording.last_input or kept.dtype is not output.dtype:
            kept = recording.keep_matrix(input, output.dtype)
        # From here on it is `recording.wait_for`, without a call of its own.
        call = LayerCall()
        call.weight, call.value, call.version = weight, kept, kept._version
        hooks = OutputHooks()
        hooks["ours"] = call.append
        made = output if output._base is None else output._base
        made._backward_hooks = hooks
        made.grad_fn._register_hook_dict(made)  # type: ignore[union-attr]  # it requires a gradient
        recording.hooks.append(hooks)
        recording.calls.append(call)
        return output


def _run_unknown(
    recording: Recording, weight: torch.Tensor | None, bias: torch.Tensor | None, value: object
) -> torch.Tensor:
    """Run a layer as it is, and let its weight be judged if it may turn out to be able to wait."""
    output = F.linear(value, weight, bias)  # type: ignore[arg-type]  # a user's mistake is torch's to tell
    if (
        type(weight) is _Parameter
        and type(value) is _Tensor
        and id(weight) not in recording.constants
        and weight not in recording.whole
        and output.requires_grad
        and weight.requires_grad
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and is_plain_place()
    ):
        recording.judge_later(weight, output)
    return output


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
