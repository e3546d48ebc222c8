"""The backward of one stage and microbatch, whole or in two halves.

The halves differ only in when the weight gradients of products are made. While a stage's forward
is recorded, a linear layer, a convolution, an embedding or any other product with a weight runs
with the weight as a constant, and a hook waits for the gradient of its output:

    forward          y = product(x, constant weight); keep x
    backward_input   one plain autograd pass; the hook keeps the gradient of y
    backward_weight  weight.grad += what x and the gradient of y make of it, for each call

So the first half is ordinary autograd in everything: other parameters, other uses of the same
weight, hooks, checkpoints, compiled code. What is not a recorded call is finished there, and no
use of a weight can be lost, whenever it comes up.

A call is recorded only where that is sure to change nothing else:

- a plain `nn.Linear` (`watched_linear.py`), or a function of torch that is one product with a
  weight of any other module or with a view of it (`watched_weight.py`);
- run eagerly, outside checkpoints, offloading and `torch.func`;
- a weight without hooks, and whose every use, when it was first met, was such a call. For that
  the layers of a stage run as they are in the first microbatch, whose graph is walked once.

Compiled modules are cut in two by themselves (`compiled.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch import nn
from torch.autograd.grad_mode import set_multithreading_enabled
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from penstock.runtime.recording import Constants, Recording, current_recording
from penstock.runtime.stage_weights import StageWeights
from penstock.runtime.watched_weight import watch_weights
from penstock.runtime.weight_work import WeightWork, collect_work

__all__ = ["LayerRecorder", "Recording", "Root", "run_backward"]

# Where a gradient enters a stage: an output (or loss), and the gradient for it.
Root: TypeAlias = tuple[GradientEdge, torch.Tensor]


class LayerRecorder:
    """Records the calls of one stage that leave weight work; remembers which weights may wait."""

    def __init__(self) -> None:
        self._constants = Constants()
        # Weights with a use that is not a plain call.
        self._whole: set[torch.Tensor] = set()
        self._weights = StageWeights()
        self._has_compiled = False
        self._has_judged = False

    def watch(self, module: nn.Module) -> bool:
        """Watch a stage's layers, weights and compiled parts; whether any could leave work."""
        self._weights = StageWeights(module)
        compiled = self._weights.compiled
        if compiled:
            # Loading the compiler takes seconds; with compiled modules it is there already.
            from penstock.runtime.compiled import split_compiled

            self._has_compiled = split_compiled(compiled)
        return self._has_compiled or self._weights.are_trained()

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the calls of watched layers and weights meanwhile, in this thread."""
        recording = Recording(self._constants, self._whole, self._weights.watched)
        token = current_recording.set(recording)
        try:
            with watch_weights(recording.watched):
                yield recording
        finally:
            current_recording.reset(token)
        self._weights.look_again()
        recording.close()

    def run_backward(
        self, recording: Recording, roots: Sequence[Root], inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[WeightWork]]:
        """The first half of a recorded forward's backward: gradients of inputs, and what waits."""
        recording.arrange_hooks()
        if recording.unjudged or (recording.watched and not self._has_judged):
            self._judge(recording, roots)
        work: list[WeightWork] = []
        with collect_work(work) if self._has_compiled else nullcontext():
            found = run_backward(roots, inputs)
        work.extend(call for call in recording.calls if call)
        return found, work

    def _judge(self, recording: Recording, roots: Sequence[Root]) -> None:
        """Find which of the weights that were new to a forward may wait later."""
        self._has_judged = bool(recording.watched)
        calls = Counter(recording.unjudged)
        uses = _count_uses([edge.node for edge, _ in roots], recording.views)
        for weight in {*recording.unjudged, *recording.watched}:
            if id(weight) in self._constants or weight in self._whole:
                continue
            if calls[weight] and uses[weight] == calls[weight]:
                self._constants.add(weight)
            elif calls[weight] or uses[weight]:
                self._whole.add(weight)
        self._weights.leave_out(self._whole)
        recording.unjudged.clear()
        recording.views.clear()


def _count_uses(
    nodes: Sequence[Node], views: Mapping[Node, torch.Tensor]
) -> Counter[torch.Tensor]:
    """How often each leaf is used in the graph behind these nodes, by itself or as a view."""
    uses: Counter[torch.Tensor] = Counter()
    seen = set(nodes)
    stack = list(seen)
    while stack:
        user = stack.pop()
        for node, _ in user.next_functions:
            if node is None:
                continue
            is_leaf = type(node).__name__ == "AccumulateGrad"
            if user not in views and (is_leaf or node in views):
                uses[node.variable if is_leaf else views[node]] += 1  # type: ignore[attr-defined]  # only this kind of node has it
            if not is_leaf and node not in seen:
                seen.add(node)
                stack.append(node)
    return uses


def run_backward(roots: Sequence[Root], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One pass of autograd: adds to `.grad`, and returns the inputs' gradients, zeros if unused.

    Inputs are leaves; their own `.grad` is left empty. The pass runs in this thread, on a device
    too: a stage is on one device, and waking a thread for it takes longer than some layers.
    """
    if roots:
        edges, gradients = zip(*roots, strict=True)
        with set_multithreading_enabled(False):
            # What `torch.autograd.backward` calls in the end; its checks take a third of the time.
            _engine_run_backward(
                edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
            )
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs]
    for leaf in inputs:
        leaf.grad = None
    return found
