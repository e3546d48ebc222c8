"""Short descriptions of arguments, for messages."""

from typing import Any

import torch

from penstock.torch_private import tree_map

__all__ = ["friendly_debug_info", "map_debug_info"]


def friendly_debug_info(v: object) -> str:
    """Describe a value in a few words; of a tensor, only its form."""
    if isinstance(v, torch.Tensor):
        return f"Tensor({v.shape}, grad={v.requires_grad}, dtype={v.dtype})"
    return str(v)


def map_debug_info(a: Any) -> Any:
    """Return the same lists, tuples and dicts with each value described."""
    return tree_map(friendly_debug_info, a)
