"""The backward of one stage and microbatch, whole or in two halves.

The halves differ only in when the weight gradients of linear layers are made. While a stage's
forward is recorded, such a layer runs with its weight as a constant, and a hook waits for the
gradient of its output:

    forward          y = linear(x, constant weight, bias); keep x
    backward_input   one plain autograd pass; the hook keeps the gradient of y
    backward_weight  weight.grad += gradient.T @ x, for each call

So the first half is ordinary autograd in everything: other parameters, other uses of the same
weight, hooks, checkpoints, compiled code. What is not a recorded call is finished there, and no
use of a weight can be lost, whenever it comes up.

A call is recorded only where that is sure to change nothing else:

- a plain `nn.Linear`, run eagerly, outside checkpoints, offloading and `torch.func`;
- a weight without hooks, and whose every use, when it was first met, was such a call. For that
  the layers of a stage run as they are in the first microbatch, whose graph is walked once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from penstock.errors import PipelineError

__all__ = [
    "LayerCall",
    "LayerRecorder",
    "Recording",
    "Root",
    "WatchedLinear",
    "add_weight_gradients",
    "run_backward",
]

# Asked for every layer: a look-up by one name is a good part of what the question costs.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_functorch_stack = torch._C._functorch.peek_interpreter_stack

# Where a gradient enters a stage: an output (or loss), and the gradient for it.
Root: TypeAlias = tuple[GradientEdge, torch.Tensor]


@dataclass(slots=True, eq=False)
class LayerCall:
    """One call of a linear layer whose weight gradient waits: its input, its output's gradient."""

    weight: torch.Tensor
    value: torch.Tensor
    version: int
    gradient: torch.Tensor | None = None

    def take_gradient(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Autograd calls this when the gradient of the layer's output is complete."""
        if torch.is_grad_enabled():
            raise PipelineError(
                "a stage differentiated a linear layer twice inside its forward, but not in its "
                "first microbatch; give the layer's weight a hook (`weight.register_hook(lambda "
                "gradient: None)`) to leave it to autograd, or use a schedule without I and W"
            )
        self.gradient = gradients[0]


class Constants:
    """Weights that may wait, each with itself as a constant; found by address, which is fast."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __contains__(self, weight: torch.Tensor) -> bool:
        return id(weight) in self._known

    def add(self, weight: torch.Tensor) -> None:
        """Let a weight wait from now on."""
        self._known[id(weight)] = (weight, weight.detach())

    def find(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The weight as a constant, if it may wait."""
        known = self._known.get(id(weight))
        if known is None:
            return None
        if known[1].data_ptr() != weight.data_ptr():
            # Somebody gave the weight other memory.
            self.add(weight)
            return self._known[id(weight)][1]
        return known[1]


@dataclass(slots=True)
class Recording:
    """What one forward leaves for its backward: calls that wait, and weights not yet judged."""

    deferrable: Constants
    whole: set[torch.Tensor]
    calls: list[LayerCall] = field(default_factory=list)
    unjudged: list[torch.Tensor] = field(default_factory=list)
    # The last input and what is kept of it: several layers often take the same one.
    last: torch.Tensor | None = None
    last_kept: torch.Tensor | None = None

    def run_layer(self, layer: nn.Linear, value: torch.Tensor) -> torch.Tensor:
        """Run a linear layer, with its weight as a constant if its gradient can wait."""
        # The same as `layer.weight`, without a Python function in between.
        parameters = layer._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        assert weight is not None, "a linear layer has a weight"
        if not _can_wait(weight, value):
            return F.linear(value, weight, bias)
        constant = self.deferrable.find(weight)
        if constant is None:
            if weight in self.whole:
                return F.linear(value, weight, bias)
            return self._try_layer(weight, bias, value)
        output = F.linear(value, constant, bias)
        if not output.requires_grad:
            output = _Anchor.apply(output, weight)  # type: ignore[no-untyped-call]  # upstream
        kept = self._keep(value, output.dtype)
        call = LayerCall(weight, kept, kept._version)
        _producer_of(output).register_prehook(call.take_gradient)
        self.calls.append(call)
        return output

    def _keep(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """An input without its graph.

        Autocast may have cast it; what it was cast to is all that the product needs.
        """
        if value is not self.last or self.last_kept is None or self.last_kept.dtype != dtype:
            kept = value.detach()
            self.last, self.last_kept = value, kept if kept.dtype == dtype else kept.to(dtype)
        return self.last_kept

    def _try_layer(
        self, weight: torch.Tensor, bias: torch.Tensor | None, value: torch.Tensor
    ) -> torch.Tensor:
        """Run a layer as it is, and find out whether its forward goes into a second derivative."""
        output = F.linear(value, weight, bias)
        self.unjudged.append(weight)

        def notice(_: object) -> None:
            if torch.is_grad_enabled():
                self.whole.add(weight)

        _producer_of(output).register_prehook(notice)
        return output


_recording: ContextVar[Recording | None] = ContextVar("penstock_recording", default=None)


class WatchedLinear(nn.Linear):
    """A linear layer of a stage that splits its backward; outside a step it is a plain one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # nn.Linear's own name
        """Run the layer, through the recording if there is one."""
        recording = None if _is_compiling() else _recording.get()
        if recording is None:
            return F.linear(input, self.weight, self.bias)
        return recording.run_layer(self, input)


class LayerRecorder:
    """Records the calls of one stage's linear layers, and remembers which weights may wait."""

    def __init__(self) -> None:
        self._deferrable = Constants()
        self._whole: set[torch.Tensor] = set()

    def watch(self, module: nn.Module) -> bool:
        """Watch the plain linear layers of a stage; whether one of them is trained."""
        layers = [layer for layer in _eager_modules(module) if _is_plain_linear(layer)]
        for layer in layers:
            layer.__class__ = WatchedLinear
        return any(layer.weight.requires_grad for layer in layers)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the calls of watched layers meanwhile, in this thread."""
        recording = Recording(self._deferrable, self._whole)
        token = _recording.set(recording)
        try:
            yield recording
        finally:
            _recording.reset(token)
            recording.last = recording.last_kept = None
        # A forward that takes gradients itself has called the hooks; that is not its backward.
        for call in recording.calls:
            call.gradient = None

    def judge(self, recording: Recording, roots: Sequence[Root]) -> None:
        """Before its backward: find which of the weights that were new to it may wait later."""
        if not recording.unjudged:
            return
        calls = Counter(
            weight
            for weight in recording.unjudged
            if weight not in self._deferrable and weight not in self._whole
        )
        recording.unjudged.clear()
        if not calls:
            return
        uses = _count_uses([edge.node for edge, _ in roots])
        for weight, count in calls.items():
            (self._deferrable if uses[weight] == count else self._whole).add(weight)


class _Anchor(torch.autograd.Function):
    """Gives an output that depends on a constant weight only a place in the graph."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:  # noqa: ARG004  # autograd's form
        return None, None


def _eager_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those below it that run as they are, not as part of compiled code."""
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return
    yield module
    for child in module.children():
        yield from _eager_modules(child)


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, WatchedLinear) and module.weight.numel() > 0  # type: ignore[operator]  # a linear layer's weight is a tensor


def _can_wait(weight: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether autograd would do nothing here but save the input and make one product of it."""
    return (
        _is_grad_enabled()
        and weight.requires_grad
        and type(weight) is nn.Parameter
        and type(value) is torch.Tensor
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and not value.is_inference()
        # Inside a checkpoint or an offload the input is not to be kept.
        and _saved_tensors_hooks(True) is None
        and _functorch_stack() is None
    )


def _producer_of(output: torch.Tensor) -> Node:
    """The node that made the values of a layer's output.

    Writing in place to an output that is a view takes the view's own node out of the graph.
    """
    made = output if output._base is None else output._base
    assert made.grad_fn is not None, "an output that is recorded has a graph"
    return made.grad_fn


def _count_uses(nodes: Sequence[Node]) -> Counter[torch.Tensor]:
    """How often each leaf is used in the graph behind these nodes."""
    uses: Counter[torch.Tensor] = Counter()
    seen = set(nodes)
    stack = list(seen)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            if type(node).__name__ == "AccumulateGrad":
                uses[node.variable] += 1  # type: ignore[attr-defined]  # only this kind of node has it
            elif node not in seen:
                seen.add(node)
                stack.append(node)
    return uses


def run_backward(roots: Sequence[Root], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One pass of autograd: adds to `.grad`, and returns the inputs' gradients, zeros if unused.

    Inputs are leaves; their own `.grad` is left empty.
    """
    if roots:
        edges, gradients = zip(*roots, strict=True)
        # What `torch.autograd.backward` calls in the end; its checks take a third of the time.
        _engine_run_backward(
            edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs]
    for leaf in inputs:
        leaf.grad = None
    return found


def add_weight_gradients(calls: list[LayerCall]) -> None:
    """Make the weight gradients that waited, letting go of each call as it is done."""
    products = _Products()
    with torch.no_grad():
        while calls:
            call = calls.pop()
            if call.value._version != call.version:
                raise PipelineError(
                    f"the input of a linear layer (shape {tuple(call.value.shape)}) was changed "
                    "in place before its weight gradient was made; change a copy of it"
                )
            if call.gradient is not None:
                products.add(call.weight, call.gradient, call.value)


class _Products:
    """Adds products of gradients and inputs to weight gradients, one after the other."""

    def __init__(self) -> None:
        # Layers that took the same input come one after the other.
        self._value: torch.Tensor | None = None
        self._columns = torch.empty(0)

    def add(self, weight: torch.Tensor, gradient: torch.Tensor, value: torch.Tensor) -> None:
        """Add one product to the gradient of its weight."""
        if value is not self._value:
            columns = _as_matrix(value)
            self._value, self._columns = value, columns.conj() if columns.is_complex() else columns
        rows, columns, total = _as_matrix(gradient).t(), self._columns, weight.grad
        if total is None:
            weight.grad = (rows @ columns).to(weight.dtype)
        elif total.dtype == rows.dtype == columns.dtype:
            total.addmm_(rows, columns)
        else:
            total.add_(rows @ columns)


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
