"""Keywords that a stage writes to in place, although stages of other ranks get them as well.

In the unsplit model, later layers see what was written. In one process they share memory, and see
it too; a stage of another rank has a batch of its own, and would not.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.errors import BatchError
from penstock.torch_private import tree_leaves

__all__ = ["WrittenKeywords"]


class WrittenKeywords:
    """The versions of keywords that other ranks get too, before and after a step.

    `kwargs` are those of the microbatches, by stage; `names` are the keywords to look at.
    """

    def __init__(
        self, kwargs: Mapping[int, Sequence[Mapping[str, Any]]], names: Collection[str]
    ) -> None:
        self._before = [
            (stage, name, tensor, tensor._version)
            for stage, columns in (kwargs.items() if names else ())
            for given in columns
            for name in given.keys() & names
            for tensor in _countable(given[name])
        ]

    def check(self) -> None:
        """Raise if any was written to."""
        for stage, name, tensor, version in self._before:
            if tensor._version != version:
                raise BatchError(
                    "a keyword that stages of several ranks take must not be written to in place "
                    f"(got {name!r}, to which stage {stage} or another one of its rank writes); "
                    "write to a copy, and send it on to the stages that need it"
                )


def _countable(value: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
            yield leaf
