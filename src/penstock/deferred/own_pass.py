"""The backward pass that a stage runs over its own graph, and how to recognise it.

Weight gradients may be deferred in exactly one pass: the stage's own. Any other pass through the
same graph (a loss that takes gradients, a hook, a second backward) must compute all of them.
Passes are recognised by the numbers that autograd gives them:

    own pass      one of the roots is a leaf of ours; autograd visits leaves first, so that its
                  hook learns the number of the pass before any node of the stage is visited
    other pass    has another number, even if it runs inside a hook of the own pass
"""

from collections.abc import Sequence
from threading import local
from typing import TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.deferred.work import DeferredWork
from penstock.torch_private import (
    FunctionBase,
    current_graph_task_id,
    engine_run_backward,
    is_multithreading_enabled,
    set_multithreading_enabled,
    storage_use_count,
)

__all__ = [
    "Root",
    "deferred_work",
    "find_edge",
    "pass_number",
    "run_backward",
    "run_own_pass",
    "work_of",
]

# Where a gradient enters a stage: an output (or loss), and the gradient for it.
Root: TypeAlias = tuple[GradientEdge, torch.Tensor]

pass_number = current_graph_task_id
# What shares the storage of a gradient of its own: the tensor, and the storage's own object.
_ALONE = 2
# A number that no pass has; outside of passes autograd returns -1.
_NONE = -2
# The deferred work of each own pass that is running, by the number of the pass. Every layer reads
# it, so it is one look-up. Numbers are unique across threads.
_deferring: dict[int, list[DeferredWork]] = {}
work_of = _deferring.get


class _OwnPass(local):
    """The own pass of this thread: its deferred work, and its number.

    A pass runs in the thread that starts it, so each thread has its own.
    """

    def __init__(self) -> None:
        self.work: list[DeferredWork] = []
        self.number = _NONE
        leaf = torch.zeros(0, device="cpu", requires_grad=True)
        leaf.register_hook(self._begin)  # type: ignore[no-untyped-call]  # untyped upstream
        self.root: Root = (get_gradient_edge(leaf), torch.zeros(0, device="cpu"))
        # Its hook is called as before, but autograd adds nothing to the gradient of the leaf.
        self._leaf = leaf.requires_grad_(False)

    def _begin(self, _gradient: torch.Tensor) -> None:
        self.number = pass_number()
        _deferring[self.number] = self.work


_own = _OwnPass()


def find_edge(tensor: torch.Tensor) -> GradientEdge:
    """Return the place of a tensor in its graph, as `get_gradient_edge` does, but faster."""
    node = tensor.grad_fn
    # A leaf has no node yet, and a node of a Python function needs an owner.
    if node is None or isinstance(node, FunctionBase):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def deferred_work() -> list[DeferredWork] | None:
    """Return the list of deferred work of the current pass, or None if it is not an own pass."""
    return work_of(pass_number())


def run_own_pass(
    roots: Sequence[Root], inputs: Sequence[torch.Tensor], work: list[DeferredWork]
) -> list[torch.Tensor]:
    """Run a stage's own backward, and append what it defers to `work`."""
    own = _own
    outer = own.work, own.number
    own.work, own.number = work, _NONE
    try:
        return run_backward([own.root, *roots] if roots else roots, inputs)
    finally:
        _deferring.pop(own.number, None)
        own.work, own.number = outer


def run_backward(roots: Sequence[Root], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run one pass of autograd; return the gradients of the inputs, or zeros if unused.

    Other gradients are added to `.grad`. Inputs are leaves, and their own `.grad` stays empty. The
    pass runs in this thread, on a device too: a stage is on one device, and waking the thread of
    that device takes longer than some layers.
    """
    if roots:
        edges, gradients = zip(*roots, strict=True)
        was_enabled = is_multithreading_enabled()
        set_multithreading_enabled(False)
        try:
            # `torch.autograd.backward` calls this after checks that take a third of the time; the
            # last two arguments let roots reach nothing, and gradients be added to leaves.
            engine_run_backward(edges, gradients, False, False, (), True, True)
        finally:
            set_multithreading_enabled(was_enabled)
    found = []
    for leaf in inputs:
        gradient = leaf.grad
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        else:
            leaf.grad = None
            is_plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
            if is_plain and storage_use_count(gradient.untyped_storage()._cdata) > _ALONE:
                # In `x.transpose(0, 1) + p.unsqueeze(1)` with one row, autograd gives `x` and `p`
                # the same memory for their gradients, and the next microbatch adds to that of
                # `p` in place, while this one may still wait to be sent.
                gradient = gradient.clone()
        found.append(gradient)
    return found
