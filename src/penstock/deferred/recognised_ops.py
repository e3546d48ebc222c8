"""The functions of torch that are recognised as products with a weight, or as views of one."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it

from penstock.deferred.einsums import find_einsum
from penstock.deferred.products import (
    Product,
    find_added_product,
    find_convolution,
    find_embedding,
    find_grouped_product,
    find_indexed_rows,
    find_linear,
    find_product,
    find_transposed_convolution,
)
from penstock.torch_private import grouped_mm

__all__ = ["VIEWS", "find_call"]

_aten = torch.ops.aten


class _Signature(NamedTuple):
    """The names of a function's arguments, and their defaults."""

    find: Callable[..., Product | None]
    names: tuple[str, ...]
    defaults: tuple[Any, ...]


def _signature(find: Callable[..., Product | None], *required: str, **optional: Any) -> _Signature:
    arguments = dict.fromkeys(required) | optional
    return _Signature(find, tuple(arguments), tuple(arguments.values()))


_LINEAR = _signature(find_linear, "input", "weight", bias=None)
_CONVOLUTION = _signature(
    find_convolution, "input", "weight", bias=None, stride=1, padding=0, dilation=1, groups=1
)
_TRANSPOSED = _signature(
    find_transposed_convolution,
    "input", "weight", bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1,
)  # fmt: skip
_EMBEDDING = _signature(
    find_embedding,
    "input", "weight", padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False,
    sparse=False,
)  # fmt: skip
_INDEXED = _signature(
    find_indexed_rows,
    "weight", "indices", padding_idx=-1, scale_grad_by_freq=False, sparse=False,
)  # fmt: skip
_MATMUL = _signature(find_product, "input", "other")
_MM = _signature(find_product, "input", "mat2")
_ADDMM = _signature(find_added_product, "input", "mat1", "mat2", beta=1, alpha=1)
_BADDBMM = _signature(find_added_product, "input", "batch1", "batch2", beta=1, alpha=1)
_EINSUM = _signature(find_einsum, "equation", "first", "second")
_GROUPED = _signature(find_grouped_product, "mat_a", "mat_b", offs=None, bias=None, out_dtype=None)

_SIGNATURES: dict[Any, _Signature] = {
    F.linear: _LINEAR,
    _aten.linear.default: _LINEAR,
    torch.conv1d: _CONVOLUTION,
    torch.conv2d: _CONVOLUTION,
    torch.conv3d: _CONVOLUTION,
    _aten.conv1d.default: _CONVOLUTION,
    _aten.conv2d.default: _CONVOLUTION,
    _aten.conv3d.default: _CONVOLUTION,
    torch.conv_transpose1d: _TRANSPOSED,
    torch.conv_transpose2d: _TRANSPOSED,
    torch.conv_transpose3d: _TRANSPOSED,
    F.embedding: _EMBEDDING,
    torch.embedding: _INDEXED,
    _aten.embedding.default: _INDEXED,
    torch.matmul: _MATMUL,
    torch.Tensor.matmul: _MATMUL,
    torch.Tensor.__matmul__: _MATMUL,
    _aten.matmul.default: _MATMUL,
    torch.mm: _MM,
    torch.Tensor.mm: _MM,
    _aten.mm.default: _MM,
    torch.bmm: _MM,
    torch.Tensor.bmm: _MM,
    _aten.bmm.default: _MM,
    torch.addmm: _ADDMM,
    torch.Tensor.addmm: _ADDMM,
    _aten.addmm.default: _ADDMM,
    torch.baddbmm: _BADDBMM,
    torch.Tensor.baddbmm: _BADDBMM,
    torch.einsum: _EINSUM,
    grouped_mm: _GROUPED,
    F.grouped_mm: _GROUPED,
}


def _reading(name: str) -> Any:
    """Return the function that torch dispatches when an attribute of a tensor is read."""
    attribute: Any = getattr(torch.Tensor, name)
    return attribute.__get__


# Views in which each element of a weight appears at most once.
VIEWS: frozenset[Any] = frozenset(
    {
        torch.Tensor.__getitem__,
        _reading("T"),
        _reading("mT"),
        *(getattr(torch.Tensor, name) for name in ("view", "reshape", "unflatten", "view_as")),
        *(
            getattr(where, name)
            for where in (torch, torch.Tensor)
            for name in (
                "t", "transpose", "permute", "swapaxes", "movedim", "select", "narrow", "split",
                "chunk", "unbind", "squeeze", "unsqueeze", "flatten",
            )
        ),
        torch.reshape,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.select.int,
        _aten.view.default,
    }
)  # fmt: skip


def find_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the product of a deferred weight that a call computes, if it is recognised."""
    signature = _SIGNATURES.get(function)
    if signature is None:
        return None
    find, names, defaults = signature
    given = len(args)
    if given > len(names):
        return None
    if not kwargs:
        return find(*args, *defaults[given:])
    left_out = _arguments_by_name(names[given:], defaults[given:], tuple(kwargs))
    if left_out is None:
        return None
    return find(*args, *[kwargs[name] if is_given else name for name, is_given in left_out])


@lru_cache(maxsize=1024)
def _arguments_by_name(
    names: tuple[str, ...], defaults: tuple[Any, ...], given: tuple[str, ...]
) -> list[tuple[Any, bool]] | None:
    """Return the names that were given, and the defaults of the others; None if one is unknown.

    Cached, since layers repeat their calls.
    """
    if not set(given) <= set(names):
        return None
    pairs = zip(names, defaults, strict=True)
    return [(name, True) if name in given else (value, False) for name, value in pairs]
