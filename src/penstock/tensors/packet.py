"""What travels from stage to stage, and how a stage is called with it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.tensors.plain import plain_value
from penstock.tensors.rerouting import Rerouting
from penstock.tensors.tree import Structure

__all__ = ["Packet", "as_arguments", "cut_off", "cut_off_all"]


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


def as_arguments(outputs: Iterable[Any], rerouting: Rerouting | None = None) -> list[Any]:
    """Return the outputs of a stage's producers as positional arguments; a tuple is several.

    >>> as_arguments(["a", ("b", "c")])
    ['a', 'b', 'c']
    """
    arguments: list[Any] = []
    for output in outputs:
        arguments.extend(output if isinstance(output, tuple) else (output,))
    return arguments if rerouting is None else rerouting.arguments(arguments)


def cut_off(tensor: torch.Tensor, *, is_copied: bool = False) -> torch.Tensor:
    """Return a tensor without its graph, in its own memory or as a copy."""
    cut = tensor.detach()
    if type(cut) is not torch.Tensor or cut.is_conj() or cut.is_neg():
        cut = plain_value(cut)
    if is_copied:
        cut = cut.clone()
    return cut.requires_grad_(tensor.requires_grad)


def cut_off_all(
    trees: Sequence[tuple[Structure, Sequence[torch.Tensor]]],
    hooked: Sequence[tuple[int, ...]],
    *,
    copies_all: bool = False,
) -> list[Packet]:
    """Return a packet per tree; a tensor with several uses is copied for all but the last.

    A stage that takes a value from its own rank is the last to get it, so that nothing is copied
    that is held until then.
    """
    uses = Counter(id(tensor) for _, tensors in trees for tensor in tensors)
    packets = []
    for (structure, tensors), places in zip(trees, hooked, strict=True):
        cut = []
        for tensor in tensors:
            uses[id(tensor)] -= 1
            cut.append(cut_off(tensor, is_copied=copies_all or uses[id(tensor)] > 0))
        packets.append(Packet(structure, cut, places))
    return packets
