"""Plain values of tensors: what a tensor must be before it is sent to another stage.

A tensor may not have its values in memory yet: it may be conjugated or negated when it is read, or
be the result of a collective that is under way. Such tensors are computed before they are sent.
Sparse, nested and other special tensors are refused.
"""

from collections.abc import Sequence
from typing import cast

import torch

from penstock.errors import BoundaryError
from penstock.torch_private import AsyncCollectiveTensor

__all__ = ["dense_value", "is_plain", "plain_value", "require_plain"]


def plain_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values: the tensor itself, unless it was lazy.

    >>> plain_value(torch.tensor([1j]).conj()).is_conj()
    False
    """
    if type(tensor) is AsyncCollectiveTensor:
        tensor = cast(torch.Tensor, tensor.trigger_wait())  # type: ignore[no-untyped-call]  # untyped upstream
    # Checked first, because resolving costs more even where nothing is to be done.
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def dense_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor as contiguous memory, whatever its layout was.

    >>> dense_value(torch.eye(2).to_sparse())
    tensor([[1., 0.],
            [0., 1.]])
    """
    tensor = plain_value(tensor.detach())
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.contiguous()


def require_plain(tensors: Sequence[torch.Tensor], stage: int, part: int) -> None:
    """Raise if a stage gives special tensors to a part that may be on another rank."""
    for tensor in tensors:
        if is_plain(tensor):
            continue
        reason = _find_reason(tensor)
        if reason is not None:
            raise BoundaryError(f"stage {stage} must give part {part} {reason}")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether nothing at all is special about a tensor, as is nearly always so."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    )


def _find_reason(tensor: torch.Tensor) -> str | None:
    """Return what a tensor must be to cross a boundary and what to do, or None if it is that."""
    if tensor.is_nested:
        return (
            f"plain tensors (got a nested one, layout {tensor.layout}); return "
            ".to_padded_tensor(0.0), or its values and lengths"
        )
    if tensor.layout is not torch.strided:
        return f"dense tensors (got the layout {tensor.layout}); return .to_dense()"
    if tensor.is_quantized:
        return f"plain tensors (got a quantized one, {tensor.dtype}); return .dequantize()"
    if tensor.is_meta:
        return (
            "tensors with values (got one on the meta device); put the model on a real device, "
            "for example with pipe.materialize"
        )
    if type(tensor) is not torch.Tensor:
        return _find_reason_of_class(tensor)
    return None


def _find_reason_of_class(tensor: torch.Tensor) -> str | None:
    """Return the same for a tensor of another class, which may still hold plain values."""
    if type(tensor) is AsyncCollectiveTensor or type(tensor.detach()) is torch.Tensor:
        return None
    return (
        f"plain tensors (got a {type(tensor).__name__}); return .as_subclass(torch.Tensor), or "
        "the tensors that it is made of"
    )
