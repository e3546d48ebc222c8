"""Estimates of the work of a node of a traced graph, with the sizes of the example.

They depend on shapes alone, so that every rank gets the same ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from penstock.splitting.by_tracing.capture.sizes import hint_of
from penstock.splitting.by_tracing.cut.assignment import is_work

__all__ = ["bytes_of", "count_moved_bytes", "count_operations"]


def bytes_of(value: Any) -> int:
    """Return the bytes of a traced tensor, with the sizes of the example; 0 for other values."""
    if not isinstance(value, torch.Tensor):
        return 0
    return _numel(value) * value.element_size()


def _numel(value: torch.Tensor) -> int:
    count = 1
    for size in value.shape:
        count *= hint_of(size)
    return count


def count_moved_bytes(node: fx.Node) -> int:
    """Return the bytes that an operation reads and writes; 0 for a view."""
    if not is_work(node) or _is_view(node):
        return 0
    return sum(bytes_of(one.meta.get("val")) for one in (node, *node.all_input_nodes))


def _is_view(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    memory = value.untyped_storage()._cdata
    sources = (source.meta.get("val") for source in node.all_input_nodes)
    return any(
        isinstance(source, torch.Tensor) and source.untyped_storage()._cdata == memory
        for source in sources
    )


def count_operations(node: fx.Node) -> int:
    """Return the multiplications and additions of a matrix product; 0 for other operations."""
    packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    values = [one.meta.get("val") for one in node.all_input_nodes]
    shapes = [[hint_of(s) for s in v.shape] for v in values if isinstance(v, torch.Tensor)]
    output = node.meta.get("val")
    if not isinstance(output, torch.Tensor):
        return 0
    match packet:
        case "linear" | "matmul" | "mm" | "bmm":
            return 2 * _numel(output) * shapes[0][-1]
        case "addmm" | "baddbmm":
            return 2 * _numel(output) * shapes[1][-1]
        case "scaled_dot_product_attention":
            queries, keys = shapes[0], shapes[1] if len(shapes) > 1 else shapes[0]
            return 4 * _product(queries) * keys[-2]
        case "conv1d" | "conv2d" | "conv3d" | "convolution":
            return 2 * _numel(output) * _product(shapes[1][1:])
        case "_grouped_mm":
            return 2 * _numel(output) * shapes[0][-1]
        case _:
            return 0


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
