"""Microbatches that share the memory of their batch, but each with its own version counter.

Views of one tensor share a version counter. A stage that writes to one microbatch in place would
then invalidate what autograd has saved of the others, although none of their values has changed.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch

__all__ = ["Aliases"]

# A microbatch, the memory that it is in, and how its values are read.
_Key: TypeAlias = tuple[int, int, torch.dtype, bool, bool]


class Aliases:
    """Splits the tensors of one step into microbatches.

    One object serves all arguments of a step: arguments that share memory share a version counter
    within a microbatch, as they do in the unsplit model.
    """

    def __init__(self) -> None:
        self._bases: dict[_Key, torch.Tensor] = {}

    def split(self, value: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
        """Split a tensor; the parts of one that requires a gradient are plain views."""
        parts = list(torch.split(value, list(sizes), dim))
        if value.requires_grad or value.is_inference() or value.layout is not torch.strided:
            return parts
        return [
            self._alias(number, part) if type(part) is torch.Tensor else part
            for number, part in enumerate(parts)
        ]

    def _alias(self, microbatch: int, part: torch.Tensor) -> torch.Tensor:
        memory = part.untyped_storage()._cdata
        key = (microbatch, memory, part.dtype, part.is_conj(), part.is_neg())
        base = self._bases.get(key)
        if base is None:
            # Unlike `detach`, `data` starts a new version counter.
            base = self._bases[key] = part.data
            return base
        return base.as_strided(part.shape, part.stride(), part.storage_offset())
