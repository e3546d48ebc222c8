"""Tensors as values: what crosses a boundary is what a tensor means, not the memory that it is on.

A tensor may be a recipe rather than numbers in memory: to be conjugated or negated when read,
still on its way from a collective, sparse, nested. Recipes with one plain meaning are carried out
before anything is sent; the others are refused.
"""

from collections.abc import Sequence
from typing import cast

import torch

from penstock.errors import BoundaryError
from penstock.torch_private import AsyncCollectiveTensor

__all__ = ["dense_value", "plain_value", "require_plain"]


def plain_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its numbers: itself, unless it was lazy.

    >>> plain_value(torch.tensor([1j]).conj()).is_conj()
    False
    """
    if type(tensor) is AsyncCollectiveTensor:
        tensor = cast(torch.Tensor, tensor.trigger_wait())  # type: ignore[no-untyped-call]  # untyped upstream
    # Asked first, since resolving costs more even where there is nothing to do.
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def dense_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor in one piece of memory, in order, whatever held them.

    >>> dense_value(torch.eye(2).to_sparse())
    tensor([[1., 0.],
            [0., 1.]])
    """
    tensor = plain_value(tensor.detach())
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.contiguous()


def require_plain(tensors: Sequence[torch.Tensor], stage: int, part: int) -> None:
    """Refuse what a stage cannot give to a part of the model that may be on another rank."""
    for tensor in tensors:
        reason = _find_reason(tensor)
        if reason is not None:
            raise BoundaryError(f"what stage {stage} gives to part {part} has a tensor {reason}")


def _find_reason(tensor: torch.Tensor) -> str | None:
    """Say why a tensor cannot cross a boundary, and what could in its place."""
    if tensor.is_nested:
        return (
            f"that is nested (layout: {tensor.layout}), where plain tensors must cross; return "
            ".to_padded_tensor(0.0), or its values and lengths"
        )
    if tensor.layout is not torch.strided:
        return (
            f"with the layout {tensor.layout}, where dense tensors must cross; return .to_dense()"
        )
    if tensor.is_quantized:
        return (
            f"that is quantized ({tensor.dtype}), where plain tensors must cross; return "
            ".dequantize()"
        )
    if tensor.is_meta:
        return (
            "on the meta device, which holds no numbers; put the model on a real device, say by "
            "pipe.materialize"
        )
    if type(tensor) is not torch.Tensor:
        return _find_reason_of_class(tensor)
    return None


def _find_reason_of_class(tensor: torch.Tensor) -> str | None:
    """Say the same of a tensor of another class; one whose values are plain is let through."""
    if type(tensor) is AsyncCollectiveTensor or type(tensor.detach()) is torch.Tensor:
        return None
    return (
        f"of the class {type(tensor).__name__}, which another rank would get as a plain tensor; "
        "return .as_subclass(torch.Tensor), or the tensors that it is made of"
    )
