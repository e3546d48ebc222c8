"""The backward pass that a stage runs over its own graph, told apart from every other pass.

Weight gradients may be deferred in exactly one pass: the stage's own. Whatever else runs through
the same graph (a loss that takes gradients, a hook, a second backward) must find it complete. The
two are told apart by the number that autograd gives each pass:

    own pass      a leaf of ours is one of the roots; autograd visits leaves first, and its hook
                  notes the number of the pass before anything of the stage is visited
    other pass    has another number, also while it runs inside a hook of the own pass
"""

from collections.abc import Sequence
from threading import local
from typing import TypeAlias

import torch
from torch.autograd.grad_mode import set_multithreading_enabled
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from penstock.deferred.work import DeferredWork

__all__ = ["Root", "deferred_work", "pass_number", "run_backward", "run_own_pass", "work_of"]

# Where a gradient enters a stage: an output (or loss), and the gradient for it.
Root: TypeAlias = tuple[GradientEdge, torch.Tensor]

pass_number = torch._C._current_graph_task_id
# A number that no pass has; outside of passes autograd says -1.
_NONE = -2
# Where each own pass that runs now leaves its weight work, by its number. Asked for every layer,
# so it is one look-up; a number is given to one pass only, whatever thread that is in.
_deferring: dict[int, list[DeferredWork]] = {}
work_of = _deferring.get


class _OwnPass(local):
    """The own pass of this thread: where it leaves its weight work, and its number.

    A pass runs in the thread that asks for it, so each thread has its own.
    """

    def __init__(self) -> None:
        self.work: list[DeferredWork] = []
        self.number = _NONE
        leaf = torch.zeros(0, device="cpu", requires_grad=True)
        leaf.register_hook(self._begin)  # type: ignore[no-untyped-call]  # untyped upstream
        self.root: Root = (get_gradient_edge(leaf), torch.zeros(0, device="cpu"))
        self._leaf = leaf

    def _begin(self, _gradient: torch.Tensor) -> None:
        self.number = pass_number()
        _deferring[self.number] = self.work


_own = _OwnPass()


def deferred_work() -> list[DeferredWork] | None:
    """Return where the pass that runs now leaves weight work; None unless it is the own pass."""
    return work_of(pass_number())


def run_own_pass(
    roots: Sequence[Root], inputs: Sequence[torch.Tensor], work: list[DeferredWork]
) -> list[torch.Tensor]:
    """Run a stage's own backward; what it defers is appended to `work`."""
    own = _own
    outer = own.work, own.number
    own.work, own.number = work, _NONE
    try:
        return run_backward([own.root, *roots] if roots else roots, inputs)
    finally:
        _deferring.pop(own.number, None)
        own.work, own.number = outer


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
