"""Microbatches that share the memory of their batch, but each with its own version counter.

Views of one tensor share a version counter. A stage that writes to one microbatch in place would
then invalidate what autograd has saved of the others, although none of their values has changed.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch

__all__ = ["Aliases"]

# The memory that a tensor is in, and how its values are read.
_Key: TypeAlias = tuple[int, torch.dtype, bool, bool]


class Aliases:
    """Splits the tensors of one step into microbatches.

    One object serves all arguments of a step: arguments that share memory share a version counter
    within a microbatch, as they do in the unsplit model.
    """

    def __init__(self) -> None:
        # The first parts that were made of each memory, one per microbatch.
        self._bases: dict[_Key, list[torch.Tensor]] = {}

    def split(self, value: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
        """Split a tensor; the parts of one that requires a gradient are plain views."""
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        is_plain = is_plain and value.layout is torch.strided
        if not is_plain or value.requires_grad or value.is_inference():
            return list(torch.split(value, list(sizes), dim))
        memory = value.untyped_storage()._cdata
        key = memory, value.dtype, value.is_conj(), value.is_neg()
        # Unlike those of `split`, these parts have version counters of their own.
        parts = list(torch.unsafe_split_with_sizes(value, list(sizes), dim))
        bases = self._bases.setdefault(key, parts)
        if bases is parts:
            return parts
        return [
            base.as_strided(part.shape, part.stride(), part.storage_offset())
            for base, part in zip(bases, parts, strict=True)
        ]
