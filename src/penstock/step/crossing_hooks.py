"""Hooks on tensors that cross from stage to stage, and the passes that would have to call them.

A hook on what a stage sends is called in that stage's backward, with the gradient that comes back,
as in the unsplit model. There, it is also called when a later layer takes a gradient with respect
to that tensor inside its forward, or a loss does. Split, that layer is in another stage, which
does not have the hook:

    sender      finds hooks on what it sends, and says so in the packet
    receiver    refuses every pass through such a tensor but its own backward
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from penstock.deferred.own_pass import deferred_work
from penstock.errors import BoundaryError

__all__ = ["ADVICE", "InnerPasses", "find_hooked"]

ADVICE = (
    "put the layer that registers the hook and the one that takes the gradient into one stage, or "
    "use register_full_backward_hook on the module that makes the tensor"
)
# Hooks from here leave gradients unchanged: those of FSDP gather weights.
_HARMLESS = "torch.distributed."


def find_hooked(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the places of the tensors on which somebody has registered a hook.

    >>> hooked = torch.ones(1, requires_grad=True) * 2
    >>> handle = hooked.register_hook(lambda gradient: 2 * gradient)
    >>> find_hooked([torch.ones(1), hooked])
    (1,)
    """
    return tuple(
        place
        for place, tensor in enumerate(tensors)
        if tensor.requires_grad and any(_find_hooks(tensor))
    )


def _find_hooks(tensor: torch.Tensor) -> Iterator[bool]:
    hooks: dict[int, Any] | None = tensor._backward_hooks
    for hook in hooks.values() if hooks else ():
        function = getattr(hook, "func", hook)
        module = getattr(function, "__module__", None) or ""
        # A value that is passed on has our own hook, which only looks.
        is_ours = isinstance(getattr(function, "__self__", None), InnerPasses)
        yield not (is_ours or module.startswith(_HARMLESS))


class InnerPasses:
    """Passes of a stage's forward or loss that reach what the stage has received.

    All that the first forward receives is observed, to know whether there are any; later only what
    has hooks on the other side. `were_seen` says whether there were any.
    """

    def __init__(self, stage: int) -> None:
        self.were_seen = False
        self._stage = stage
        self._has_begun = False

    def is_due(self, hooked: Collection[int]) -> bool:
        """Whether a forward is to be observed that receives tensors with hooks at these places."""
        return bool(hooked) or not self._has_begun

    def observe(self, tensors: Sequence[torch.Tensor], hooked: Collection[int]) -> None:
        """Observe the tensors that a forward is about to be given from one stage."""
        for place, tensor in enumerate(tensors):
            if tensor.requires_grad and (place in hooked or not self._has_begun):
                tensor.register_hook(partial(self._notice, place in hooked))  # type: ignore[no-untyped-call]  # untyped upstream

    def end_first(self) -> None:
        """Observe only what has hooks from now on."""
        self._has_begun = True

    def _notice(self, is_hooked: bool, _gradient: torch.Tensor) -> None:
        if deferred_work() is not None:
            return
        self.were_seen = True
        if is_hooked:
            raise BoundaryError(
                f"stage {self._stage} takes a gradient in its forward or loss with respect to a "
                "tensor from an earlier stage, which has registered a hook on it; the hook would "
                f"not be called here, as it is in the unsplit model: {ADVICE}"
            )
