"""Arguments and outputs that hooks get inside of one call of a unit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.splitting.by_layers.hooks.hooks import Given
from penstock.torch_private import tree_leaves

__all__ = ["Observed", "observe", "seen_by_hooks", "version_of"]


@dataclass(frozen=True, slots=True)
class Observed:
    """One call of a module with hooks: its arguments, and its output before any hook."""

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
        """Whether the output was written to in place, which hooks must not do again."""
        return _versions(self.output) != self.versions

    def is_left_as(self, output: Any) -> bool:
        """Return whether hooks have neither replaced the output nor written to it."""
        old_leaves, new_leaves = tree_leaves(self.output), tree_leaves(output)
        is_same = len(old_leaves) == len(new_leaves) and all(
            new is old for new, old in zip(new_leaves, old_leaves, strict=True)
        )
        return is_same and not self.is_written


def observe(path: str, given: Given, output: Any) -> Observed:
    """Return one call of a module, before its hooks are called."""
    return Observed(path, given, output, _versions(output))


def seen_by_hooks(unit: str, observed: Sequence[Observed], output: Any) -> list[Observed]:
    """Return the calls that other stages need; the unit's own only if hooks changed its output."""
    return [one for one in observed if one.path != unit or not one.is_left_as(output)]


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that increases when a tensor is written to in place."""
    return 0 if tensor.is_inference() else tensor._version


def _versions(tree: Any) -> tuple[int, ...]:
    return tuple(version_of(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
