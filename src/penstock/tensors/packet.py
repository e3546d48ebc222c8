"""What travels from stage to stage, and how a stage is called with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.tensors.tree import Structure

__all__ = ["Packet", "as_arguments"]


# Not frozen: every message makes one, and setting frozen fields takes three times as long.
@dataclass(slots=True)
class Packet:
    """A tree on its way between stages: its structure, and its detached tensors.

    A gradient comes back for each tensor that requires one. `hooked` are the positions of those
    on which the sender has registered hooks, which wait for that gradient.
    """

    structure: Structure
    tensors: list[torch.Tensor]
    hooked: tuple[int, ...] = ()

    @property
    def is_one_leaf(self) -> bool:
        """Whether it is just one tensor that a gradient comes back for, without hooks."""
        return self.structure == "T" and not self.hooked and self.tensors[0].requires_grad


def as_arguments(outputs: Iterable[Any]) -> list[Any]:
    """Return the outputs of a stage's producers as positional arguments; a tuple is several.

    >>> as_arguments(["a", ("b", "c")])
    ['a', 'b', 'c']
    """
    arguments: list[Any] = []
    for output in outputs:
        arguments.extend(output if isinstance(output, tuple) else (output,))
    return arguments
