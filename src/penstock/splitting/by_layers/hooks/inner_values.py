"""What hooks have seen inside of one call of a unit, while the call lasts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.splitting.by_layers.hooks.hooks import Given
from penstock.torch_private import tree_leaves

__all__ = ["Observed", "observe", "seen_by_hooks", "version_of"]


@dataclass(frozen=True, slots=True)
class Observed:
    """One call of a module that hooks look at: what it got, what it made before any hook."""

    path: str
    given: Given
    output: Any
    versions: tuple[int, ...]

    @property
    def tree(self) -> tuple[Any, ...]:
        """Everything that hooks get."""
        return (*self.given, self.output)

    @property
    def is_written(self) -> bool:
        """Whether the output was written to in place, so that hooks must not do it again."""
        return _versions(self.output) != self.versions

    def is_left_as(self, output: Any) -> bool:
        """Whether hooks have neither replaced the output nor written to it."""
        leaves, kept = tree_leaves(self.output), tree_leaves(output)
        is_same = len(leaves) == len(kept) and all(
            new is old for new, old in zip(kept, leaves, strict=True)
        )
        return is_same and not self.is_written


def observe(path: str, given: Given, output: Any) -> Observed:
    """What is to be known of one call, taken down before hooks are called."""
    return Observed(path, given, output, _versions(output))


def seen_by_hooks(unit: str, observed: Sequence[Observed], output: Any) -> list[Observed]:
    """The calls of which other stages have to be told: the unit's own only if hooks changed it."""
    return [one for one in observed if one.path != unit or not one.is_left_as(output)]


def version_of(tensor: torch.Tensor) -> int:
    """A number that rises when a tensor is written to in place."""
    return 0 if tensor.is_inference() else tensor._version


def _versions(tree: Any) -> tuple[int, ...]:
    return tuple(version_of(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
