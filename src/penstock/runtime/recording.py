"""What one forward of a stage leaves for its backward, while its layers are watched.

A call whose weight gradient can wait runs with its weight as a constant. What is kept of it is a
list, and the list's own `append` is the hook that takes the gradient of its output: autograd puts
it there without running any Python.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node

from penstock.errors import PipelineError

__all__ = [
    "Constant",
    "Constants",
    "OutputHooks",
    "Recording",
    "WaitingCall",
    "current_recording",
    "is_plain_place",
]

_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_functorch_stack = torch._C._functorch.peek_interpreter_stack


class WaitingCall(Protocol):
    """A call whose weight gradient waits: a list for the gradient of its output."""

    weight: nn.Parameter

    def append(self, gradient: torch.Tensor, /) -> None:
        """Take the gradient of the call's output; autograd calls this."""

    def clear(self) -> None:
        """Forget what was taken."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...

    def finish(self) -> None:
        """Add what the call makes of it to the weight's gradient."""


class Constant(NamedTuple):
    """A weight that may wait, itself as a constant, and where its numbers are."""

    weight: nn.Parameter
    value: torch.Tensor
    address: int


class Constants(dict[int, Constant]):
    """Weights that may wait, each with itself as a constant; found by identity, which is fast."""

    def add(self, weight: nn.Parameter) -> torch.Tensor:
        """Let a weight wait from now on; it as a constant."""
        constant = weight.detach()
        self[id(weight)] = Constant(weight, constant, weight.data_ptr())
        return constant


class OutputHooks(dict[Any, Callable[[torch.Tensor], Any]]):
    """The hooks of a call's output: ours, and those that the module adds to them."""

    __slots__ = ("__weakref__",)

    def put_ours_last(self) -> None:
        """Let those of the module change the gradient before we take it."""
        self["ours"] = self.pop("ours")


class Recording:
    """What one forward leaves: calls that wait, and weights not yet judged."""

    __slots__ = (
        "calls", "constants", "hooks", "last", "last_input", "last_kept", "last_matrix",
        "unjudged", "views", "watched", "whole",
    )  # fmt: skip

    def __init__(
        self, constants: Constants, whole: set[torch.Tensor], watched: Sequence[nn.Parameter]
    ) -> None:
        self.constants = constants
        self.whole = whole
        # Weights that see their calls; linear layers see to theirs.
        self.watched = watched
        self.calls: list[WaitingCall] = []
        self.unjudged: list[nn.Parameter] = []
        # Which nodes of the graph are views of weights, and of which weight.
        self.views: dict[Node, nn.Parameter] = {}
        self.hooks: list[OutputHooks] = []
        # The last input and what is kept of it: several layers often take the same one.
        self.last: torch.Tensor | None = None
        self.last_kept: torch.Tensor | None = None
        # The same for linear layers, which need a matrix.
        self.last_input: torch.Tensor | None = None
        self.last_matrix: torch.Tensor | None = None

    def wait_for(self, call: WaitingCall, output: torch.Tensor) -> None:
        """Let a call take the gradient of its output, and make its weight's gradient later."""
        hooks = OutputHooks(ours=call.append)
        # Writing in place to an output that is a view takes the view's own node out of the graph.
        made = output if output._base is None else output._base
        made._backward_hooks = hooks
        made.grad_fn._register_hook_dict(made)  # type: ignore[union-attr]  # it requires a gradient
        self.hooks.append(hooks)
        self.calls.append(call)

    def keep(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """An input without its graph.

        Autocast may have cast it; what it was cast to is all that a product needs.
        """
        kept = self.last_kept
        if kept is None or value is not self.last or kept.dtype is not dtype:
            kept = value.detach()
            if kept.dtype is not dtype:
                kept = kept.to(dtype)
            self.last, self.last_kept = value, kept
        return kept

    def keep_matrix(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """An input without its graph, as a matrix if that takes no copy."""
        kept = value.detach()
        if kept.dtype is not dtype:
            kept = kept.to(dtype)
        if kept.dim() > 2 and kept.is_contiguous():
            kept = kept.view(-1, kept.shape[-1])
        self.last_input, self.last_matrix = value, kept
        return kept

    def judge_later(self, weight: nn.Parameter, output: torch.Tensor) -> None:
        """Note a call that ran as it is, and find out if it goes into a second derivative."""
        self.unjudged.append(weight)

        def notice(_: object) -> None:
            if torch.is_grad_enabled():
                self.whole.add(weight)

        made = output if output._base is None else output._base
        assert made.grad_fn is not None, "a call with a weight that is trained has a graph"
        made.grad_fn.register_prehook(notice)

    def note_view(self, node: Node, weight: nn.Parameter) -> None:
        """Note that everything from here to a weight in the graph is a view of it."""
        if id(weight) in self.constants:
            return
        while node not in self.views and node.next_functions:
            self.views[node] = weight
            ((behind, _),) = node.next_functions
            assert behind is not None, "a view of a weight leads to the weight"
            node = behind

    def anchor(self, output: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        """Give an output a place in the graph, where a constant weight has left it none."""
        anchored: torch.Tensor = _Anchor.apply(output, weight)  # type: ignore[no-untyped-call]  # upstream
        return anchored

    def close(self) -> None:
        """After the forward: what it did with gradients by itself is not its backward."""
        self.last = self.last_kept = self.last_input = self.last_matrix = None
        for call in self.calls:
            if call:
                _require_single_derivative(call)
                call.clear()

    def arrange_hooks(self) -> None:
        """Before the backward: let gradients pass all other hooks before they are taken."""
        for hooks in self.hooks:
            if len(hooks) > 1:
                hooks.put_ours_last()
        self.hooks.clear()


current_recording: ContextVar[Recording | None] = ContextVar("penstock_recording", default=None)


def is_plain_place() -> bool:
    """Whether what runs here is neither checkpointed, offloaded nor transformed.

    In the first two an input is not to be kept, and in the last it is not what it seems.
    """
    return _saved_tensors_hooks(True) is None and _functorch_stack() is None


class _Anchor(torch.autograd.Function):
    """Takes a gradient and passes nothing on."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:  # noqa: ARG004  # autograd's form
        return None, None


def _require_single_derivative(call: WaitingCall) -> None:
    gradients = [call[number] for number in range(len(call))]
    if any(gradient is not None and gradient.requires_grad for gradient in gradients):
        raise PipelineError(
            "a stage differentiated a layer twice inside its forward, but not in its first "
            "microbatch; give the layer's weight a hook (`weight.register_hook(lambda gradient: "
            "None)`) to leave it to autograd, or use a schedule without I and W"
        )
