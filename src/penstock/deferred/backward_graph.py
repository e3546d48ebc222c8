"""Cutting the graph of a compiled backward in two: input gradients first, weight products second.

    whole         tangents, saved -> gradients of inputs, weights, scales ...
    first half    tangents, saved -> gradients of inputs, scales ..., operands of the products
    second half   operands        -> gradients of weights

A weight's gradient moves to the second half if it is computed by matrix products, convolutions,
and views and sums of them. Views of the operands move with it, so that each tensor that they view
is kept only once between the halves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

__all__ = ["CutBackward", "GraphProduct", "cut_backward"]

_aten = torch.ops.aten

_CONVOLUTION = _aten.convolution_backward.default
_PRODUCTS = {_aten.mm.default, _aten.bmm.default, _aten._grouped_mm.default}
_VIEWS = {
    _aten.view.default,
    _aten.permute.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.squeeze.dim,
    _aten.unsqueeze.default,
}
# Operations allowed between a product and the gradient computed from it.
_FOLLOWERS = {*_VIEWS, _aten.add.Tensor, _aten._to_copy.default, _aten._unsafe_view.default} | {
    # Inductor's own cast.
    torch.ops.prims.convert_element_type.default
}


@dataclass(frozen=True)
class GraphProduct:
    """The second half of one weight's gradient, computed from operands that the first half keeps.

    `output` and `weight` are positions in the outputs and inputs of the whole graph. `make` takes
    the operands and returns the gradient, or the two factors of it if `gives_factors`.
    """

    output: int
    weight: int
    operands: tuple[int, ...]
    make: Callable[..., Any]
    gives_factors: bool


@dataclass(frozen=True)
class CutBackward:
    """Both halves of a backward.

    `first_half` returns the outputs of the whole, with None for the gradient of each product, and
    then the operands that it computed. The operands of a product are numbered: first come the
    inputs of the graph, then these computed operands.
    """

    first_half: fx.GraphModule
    products: tuple[GraphProduct, ...]
    num_inputs: int
    num_outputs: int


def cut_backward(whole: fx.GraphModule) -> CutBackward | None:
    """Cut the graph of a backward in two, in place; return None if no product can be deferred."""
    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    position = {node.name: number for number, node in enumerate(inputs)}
    output = next(iter(whole.graph.find_nodes(op="output")))
    gradients: list[Any] = list(output.args[0])
    found: list[tuple[int, int, _Region]] = []
    for number, gradient in enumerate(gradients):
        # Gradients are in the order of the forward's inputs, whose names hold their positions.
        weight = position.get(f"primals_{number + 1}")
        if weight is None or gradients.count(gradient) > 1:
            continue
        if not _is_gradient_of(gradient, inputs[weight]):
            continue
        region = _find_region(gradient)
        if region is not None:
            found.append((number, weight, region))
    if not found:
        return None
    operands = list(dict.fromkeys(node for _, _, region in found for node in region.operands))
    computed = [node for node in operands if node.op != "placeholder"]
    index = {node: position[node.name] for node in operands if node.op == "placeholder"}
    index |= {node: len(inputs) + number for number, node in enumerate(computed)}
    products = tuple(
        GraphProduct(number, weight, tuple(index[n] for n in region.operands), *region.compile())
        for number, weight, region in found
    )
    for number, _, _ in found:
        gradients[number] = None
    _replace_outputs(whole, output, [*gradients, *computed])
    return CutBackward(whole, products, len(inputs), len(gradients))


def _is_gradient_of(gradient: object, weight: fx.Node) -> bool:
    if not isinstance(gradient, fx.Node):
        return False
    value, target = gradient.meta.get("val"), weight.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    return bool(value.shape == target.shape)


class _Region:
    """The nodes that compute one gradient, in order, and the outer nodes that they start from."""

    def __init__(self, gradient: fx.Node, nodes: set[fx.Node]) -> None:
        self._gradient = gradient
        self._nodes = [node for node in gradient.graph.nodes if node in nodes]
        self.operands = list(
            dict.fromkeys(
                n for node in self._nodes for n in node.all_input_nodes if n not in nodes
            )
        )

    def compile(self) -> tuple[Callable[..., Any], bool]:
        """Return a function of the operands, and whether it returns factors, not the gradient."""
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"operand_{i}") for i, node in enumerate(self.operands)}
        for node in self._nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.target is _CONVOLUTION:
                _request(copies[node], weight=True)
        gives_factors = self._gradient.target in (_aten.mm.default, _aten.bmm.default)
        last = copies[self._gradient]
        graph.output(last.args if gives_factors else last)
        graph.eliminate_dead_code()
        return fx.GraphModule({}, graph).forward, gives_factors


def _find_region(gradient: fx.Node) -> _Region | None:
    """Find the products that only this gradient uses, with the views and sums around them."""
    nodes: set[fx.Node] = set()
    products = _collect_products(gradient, nodes)
    if not products:
        return None
    for product in products:
        nodes |= set(_views_before(product))
    return _Region(gradient, nodes)


def _collect_products(node: fx.Node, nodes: set[fx.Node]) -> list[fx.Node]:
    """Return the products that a node is computed from, or nothing if anything else is involved.

    Each node on the way may have one user only. The products, and the nodes between them and this
    node, are added to `nodes`.
    """
    if node.op != "call_function" or len(node.users) != 1 or not _is_static(node):
        return []
    nodes.add(node)
    if node.target in _PRODUCTS:
        return [node]
    if _is_convolution_weight(node):
        nodes.add(node.all_input_nodes[0])
        return node.all_input_nodes
    if node.target not in _FOLLOWERS:
        return []
    behind = [_collect_products(source, nodes) for source in node.all_input_nodes]
    return [product for products in behind for product in products] if all(behind) else []


def _is_convolution_weight(node: fx.Node) -> bool:
    if node.target is not getitem or node.args[1] != 1:
        return False
    return node.all_input_nodes[0].target is _CONVOLUTION


def _views_before(product: fx.Node) -> Iterator[fx.Node]:
    """Yield the views before a product; if they have other users, both halves compute them."""
    for node in product.all_input_nodes:
        while node.op == "call_function" and node.target in _VIEWS and _is_static(node):
            yield node
            node = node.all_input_nodes[0]


def _is_static(node: fx.Node) -> bool:
    """Whether no argument of a node is a symbolic size."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return all(isinstance(value, torch.Tensor | tuple | list) for value in values)


def _request(convolution: fx.Node, *, weight: bool) -> None:
    """Make the backward of a convolution compute only its weight's gradient, or all others."""
    *arguments, mask = convolution.args
    assert isinstance(mask, list | tuple), "the last argument says which gradients to compute"
    wanted = [False, True, False] if weight else [mask[0], False, mask[2]]
    convolution.args = (*arguments, wanted)


def _replace_outputs(module: fx.GraphModule, output: fx.Node, values: list[Any]) -> None:
    output.args = (tuple(values),)
    # Inductor keeps the strides of these outputs; those that became None have none.
    visible = output.meta.get("user_visible_output_idxs", ())
    output.meta["user_visible_output_idxs"] = [n for n in visible if values[n] is not None]
    module.graph.eliminate_dead_code()
    for node in module.graph.find_nodes(op="call_function", target=_CONVOLUTION):
        if not any(user.args[1] == 1 for user in node.users):
            _request(node, weight=False)
    module.recompile()
