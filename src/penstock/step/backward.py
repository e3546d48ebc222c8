"""The backward of one stage and microbatch, whole or in two halves.

The halves differ only in when the weight gradients of products are made. The weight of every
linear layer, convolution, embedding or other product is in the graph as always; but the node that
has it asks which pass it is visited in:

    forward                     y = product(x, weight); keep x
    the stage's own pass (I)    gradient of x, and of all else; keep the gradient of y
    backward_weight (W)         weight.grad += what x and the gradient of y make of it
    any other pass              gradients of x and weight, as autograd makes them

So whoever takes gradients through a stage, once or twice, gets what the plain model gives, and
the own pass finds everything as the forward has left it. What is not such a call, and any other
use of the same weight, is finished in I by autograd.

A call is deferred only where that is sure to change nothing else:

- a plain `nn.Linear` (`deferred/linear.py`), or a function of torch that is one product with a
  weight of any other module or with a view of it (`deferred/weight.py`);
- run eagerly, outside checkpoints, offloading and `torch.func`;
- a weight without hooks.

Compiled modules are cut in two by themselves (`deferred/compiled.py`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Token

import torch
from torch import nn

from penstock.deferred.calls import DeferredCalls, current_recording
from penstock.deferred.own_pass import Root, run_backward, run_own_pass
from penstock.deferred.stage_weights import StageWeights
from penstock.deferred.weight import stop_watching, watch_weights
from penstock.deferred.work import DeferredWork
from penstock.torch_private import top_saved_tensors_default_hooks

__all__ = ["LayerRecorder", "Root", "run_backward"]


class _Recording:
    """A forward that is recorded; a class, since a generator takes longer than some layers."""

    __slots__ = ("_calls", "_token", "_watched", "_weights")

    def __init__(self, weights: StageWeights, calls: DeferredCalls) -> None:
        self._weights, self._calls = weights, calls
        self._watched: list[nn.Parameter] = []
        self._token: Token[DeferredCalls | None] | None = None

    def __enter__(self) -> None:
        self._token = current_recording.set(self._calls)
        if self._weights.watched:
            self._watched = watch_weights(self._weights.watched)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._token is not None, "entered before"
        current_recording.reset(self._token)
        stop_watching(self._watched)
        calls = self._calls
        calls.close()
        if kind is not None:
            return
        self._weights.look_again()
        if calls.used:
            # Watching costs something in every call, and for these it was of no use.
            self._weights.leave_out(calls.used - calls.products)
            calls.used.clear()


class LayerRecorder:
    """Observes the layers and weights of one stage, and defers weight work of its backwards."""

    def __init__(self) -> None:
        self._weights = StageWeights()
        self._module = nn.Module()
        # Weights that were given to functions of torch, those that made products with them,
        # and those whose gradients were deferred.
        self._observed: set[nn.Parameter] = set()
        self._products: set[torch.Tensor] = set()
        self._deferred: set[torch.Tensor] = set()
        self._num_deferred = -1

    def observe(self, module: nn.Module) -> bool:
        """Observe a stage's layers, weights and compiled parts; whether any could leave work."""
        self._weights, self._module = StageWeights(module), module
        compiled = self._weights.compiled
        has_compiled = False
        if compiled:
            # Loading the compiler takes seconds; with compiled modules it is there already.
            from penstock.deferred.compiled import split_compiled

            has_compiled = split_compiled(compiled)
        return has_compiled or self._weights.are_trained()

    def record(self) -> AbstractContextManager[None]:
        """Let calls of observed layers and weights be deferred meanwhile, in this thread.

        Where hooks decide what a forward saves, no call is deferred, and nothing is to be learned.
        """
        if top_saved_tensors_default_hooks(True) is not None:
            return nullcontext()
        return _Recording(self._weights, DeferredCalls(self._observed, self._products))

    def run_backward(
        self, roots: Sequence[Root], inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[DeferredWork]]:
        """Run the first half of a recorded forward's backward: input gradients, deferred work."""
        work: list[DeferredWork] = []
        found = run_own_pass(roots, inputs, work)
        if len(work) != self._num_deferred:
            self._num_deferred = len(work)
            self._deferred.update(
                w for item in work if (w := getattr(item, "weight", None)) is not None
            )
        return found, work

    def undeferred_weights(self) -> list[str]:
        """Return the names of the trained weights whose gradients only I has made so far.

        Only weights of two dimensions and more count: there is little to defer in others.
        """
        return [
            name
            for name, weight in self._module.named_parameters()
            if weight.requires_grad and weight.dim() >= 2 and weight not in self._deferred
        ]
