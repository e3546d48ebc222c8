"""Block masks of flex attention, which have rows like the batch that they are for."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BlockMask", "has_rows", "split_mask"]


def has_rows(mask: BlockMask) -> bool:
    """Return whether a mask has rows of its own, and is not one for all rows of a batch."""
    return mask.kv_num_blocks.size(0) > 1


def split_mask(mask: BlockMask, counts: Sequence[int]) -> list[BlockMask]:
    """Split a mask by rows; what each part calls its first row is that of the whole batch."""
    blocks: Any = (mask.kv_num_blocks, mask.kv_indices)
    blocks += (mask.full_kv_num_blocks, mask.full_kv_indices)
    columns = [[None] * len(counts) if one is None else one.split(counts) for one in blocks]

    def shifted(start: int, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return mask.mask_mod(b + torch.full_like(b, start), *rest)

    form: Any = {"BLOCK_SIZE": mask.BLOCK_SIZE, "seq_lengths": mask.seq_lengths}
    return [
        BlockMask.from_kv_blocks(*parts, **form, mask_mod=partial(shifted, start))  # type: ignore[misc]  # four blocks come first
        for start, *parts in zip(accumulate(counts[:-1], initial=0), *columns, strict=True)
    ]
