"""Checks of what a step is given."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.errors import BatchError
from penstock.torch_private import tree_flatten

__all__ = ["check_counts", "check_rows", "count_rows"]


class LossesTypeError(BatchError, TypeError):
    """Microbatches or losses come in a list; also a `TypeError`, which torch's users expect."""


def check_counts(given: Mapping[str, Any], losses: Any, microbatches: int) -> None:
    """Refuse what is not one item per microbatch, in a list."""
    for name, items in {**given, "losses": losses}.items():
        if items is not None and not isinstance(items, list):
            raise LossesTypeError(f"{name} must be a list (got {type(items).__name__})")
    for name, items in given.items():
        if items is not None and len(items) != microbatches:
            raise BatchError(
                f"Expecting {microbatches} {name} but got {len(items)}; a batch has at least one "
                "row per microbatch"
            )


def count_rows(arg_mbs: Sequence[Any], spec: tuple[Any, ...] | None) -> int | None:
    """Return how many rows the first tensor that is split has in all microbatches together."""
    dims = None if spec is None else [getattr(s, "split_dim", None) for s in tree_flatten(spec)[0]]
    total = 0
    for args in arg_mbs:
        leaves = tree_flatten(tuple(args))[0]
        splits = [0] * len(leaves) if dims is None else dims
        sizes = [
            leaf.shape[dim]
            for leaf, dim in zip(leaves, splits, strict=False)
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and dim is not None
        ]
        if not sizes:
            return None
        total += sizes[0]
    return total


def check_rows(rows: int | None, target_mbs: Sequence[Any]) -> None:
    """Refuse a target whose rows are neither those of the batch nor a multiple of them."""
    are_split = all(isinstance(t, torch.Tensor) and t.dim() > 0 for t in target_mbs)
    if rows is not None and are_split:
        found = sum(target.shape[0] for target in target_mbs)
        if found % rows:
            raise BatchError(
                f"the target has {found} rows for a batch of {rows}, so that microbatches of "
                "outputs and targets would not belong together"
            )
