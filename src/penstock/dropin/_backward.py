"""The backward of a stage on a graph that somebody else has recorded, whole or in two halves.

    output -- n1 -- n2 -- input        n1, n2: nodes on the way to an input
              |     |                  the cut: their edges to what leads to weights only
              w1    w2

The gradient that arrives at such a node serves both ways: `stage_backward_input` notes it, and
`stage_backward_weight` continues from there, in one pass for nodes that lead to a common weight.
Stages in our own schedules split earlier and at less cost (`penstock.step.backward`).
"""

import operator
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter

from penstock.dropin._debug import map_debug_info
from penstock.dropin.stages.values import Gradients, find_edge
from penstock.errors import ModelError, PipelineError
from penstock.torch_private import FunctionBase

__all__ = [
    "_autograd_grad_for_inputs",
    "_get_grad_fn_or_grad_acc",
    "_null_coalesce_accumulate",
    "construct_reverse_graph",
    "get_param_groups",
    "reverse_closure",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]

Root: TypeAlias = torch.Tensor | GradientEdge
# Where a backward starts, and with which gradient.
Start: TypeAlias = tuple[GradientEdge, torch.Tensor]
Edges: TypeAlias = dict[Node, list[Node]]


class MissingGradientError(ModelError, AssertionError):
    """An output has no gradient to start from, or one of another form."""


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: list[int] | None = None,
) -> Gradients:
    """Add to the gradients of all leaves behind an output, and return (not keep) the inputs'."""
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[index] for index in outputs_with_grads_idxs]
        output_grads = [output_grads[index] for index in outputs_with_grads_idxs]
    try:
        if pairs := list(_pair_up(stage_output, output_grads)):
            roots, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(roots, gradients)
    except Exception as error:
        raise _failure("backward", stage_output, output_grads, input_values) from error
    return tuple(_take_gradient(value) for value in input_values)


def stage_backward_input(
    stage_outputs_or_loss: Sequence[Root],
    output_grads: Sequence[torch.Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[Parameter],
) -> tuple[Gradients, list[dict[str, Any]]]:
    """Return the gradients of the inputs, and where `stage_backward_weight` continues."""
    grads = [None] * len(stage_outputs_or_loss) if output_grads is None else output_grads
    roots = [
        (edge, _start(output, grad))
        for output, grad in zip(stage_outputs_or_loss, grads, strict=True)
        if (edge := find_edge(output))
    ]
    wanted = [edge.node for value in input_values if (edge := find_edge(value))]
    trained = [edge.node for weight in weights if (edge := find_edge(weight))]
    try:
        param_groups = _find_groups(roots, wanted, trained)
        dinputs = _differentiate(roots, input_values, param_groups)
    except Exception as error:
        arguments = (stage_outputs_or_loss, output_grads, input_values)
        raise _failure("backward for inputs", *arguments) from error
    for value, gradient in zip(input_values, dinputs, strict=True):
        if gradient is not None and (value.is_leaf or value.retains_grad):
            value.grad = _null_coalesce_accumulate(value.grad, gradient)
    for output in stage_outputs_or_loss:
        # The graph is cut off as far as that can be done in place.
        if isinstance(output, torch.Tensor) and not output._is_view():
            output.detach_()
    return dinputs, param_groups


def stage_backward_weight(
    weights: Iterable[Parameter], param_groups: list[dict[str, Any]], retain_graph: bool = False
) -> Gradients:
    """Add to the gradients of the weights what is left of them; return the weights' gradients."""
    for group in param_groups:
        noted = list(zip(group.pop("intermediates"), group.pop("grads"), strict=False))
        pairs = [
            (GradientEdge(node, number), gradient)
            for node, gradients in noted
            for number, gradient in enumerate(gradients)
            if gradient is not None
        ]
        if not pairs:
            continue
        trained = [node.variable for node in group["params"]]
        with ExitStack() as hooks:
            # What comes down from one intermediate to another has been counted there already.
            for node, saved in noted:
                hooks.enter_context(node.register_prehook(lambda _, saved=saved: saved))
            edges, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(edges, gradients, retain_graph, inputs=trained)
    return tuple(weight.grad for weight in weights)


def _null_coalesce_accumulate(
    lhs: torch.Tensor | None, rhs: torch.Tensor | None
) -> torch.Tensor | None:
    if lhs is None or rhs is None:
        return rhs if lhs is None else lhs
    return lhs + rhs


def _autograd_grad_for_inputs(
    outputs: Sequence[Root],
    inputs: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> Gradients:
    """Return the gradients of the inputs that take one, and None for the others."""
    wanted = [value for value in inputs if find_edge(value)]
    grads = [None] * len(outputs) if grad_outputs is None else grad_outputs
    pairs = [pair for pair in zip(outputs, grads, strict=True) if find_edge(pair[0])]
    if not (wanted and pairs):
        return (None,) * len(inputs)
    roots, starts = zip(*pairs, strict=True)
    found = iter(
        torch.autograd.grad(roots, wanted, starts, retain_graph, allow_unused=allow_unused)
    )
    return tuple(next(found) if find_edge(value) else None for value in inputs)


def _get_grad_fn_or_grad_acc(t: torch.Tensor) -> Node | None:
    """Return the node that a tensor's gradient enters by, if it takes one."""
    return edge.node if (edge := find_edge(t)) else None


def _find_groups(
    roots: Sequence[Start], inputs: Sequence[Node], weights: Sequence[Node]
) -> list[dict[str, Any]]:
    """Return where to cut the graph behind these roots, and what is known to arrive there."""
    nodes = [edge.node for edge, _ in roots]
    before = construct_reverse_graph(nodes)
    if inputs:
        groups = _group(inputs, weights, before, set(nodes))
    else:
        reached = {weight for weight in weights if weight in before or weight in nodes}
        groups = [(reached, list(dict.fromkeys(nodes)))] if reached else []
    found: list[dict[str, Any]] = []
    for params, intermediates in groups:
        grads = [_given_to(node, roots) for node in intermediates]
        found.append({"params": params, "intermediates": intermediates, "grads": grads})
        if any(isinstance(node, FunctionBase) for node in intermediates):
            # A node of a Python function does not keep itself alive; what leads to it does.
            found[-1]["owners"] = [edge for edge, _ in roots]
    return found


def _given_to(node: Node, roots: Sequence[Start]) -> Gradients:
    given = {edge.output_nr: grad for edge, grad in roots if edge.node is node}
    return tuple(given.get(number) for number in range(max(given, default=-1) + 1))


def get_param_groups(
    inputs: list[Node], params: list[Node], reverse_edges_dict: Edges
) -> list[dict[str, Any]]:
    """Return parameters together with the nodes where their ways part from those of the inputs."""
    groups = _group(inputs, params, reverse_edges_dict, set())
    return [{"params": weights, "intermediates": set(nodes)} for weights, nodes in groups]


def _group(
    inputs: Sequence[Node], weights: Sequence[Node], before: Edges, roots: set[Node]
) -> list[tuple[set[Node], list[Node]]]:
    """Return weights, by common ones, and the nodes from which all of their gradients come."""
    on_the_way, _ = reverse_closure(list(inputs), set(), before)
    starts: dict[Node, set[Node]] = {}
    for weight in weights:
        found, met = reverse_closure([weight], on_the_way, before)
        for node in met | (found & roots):
            starts.setdefault(node, set()).add(weight)
    group_of: dict[Node, tuple[set[Node], list[Node]]] = {}
    for node, own in starts.items():
        joined = {id(group): group for weight in own if (group := group_of.get(weight))}.values()
        nodes = [one for _, others in joined for one in others]
        group = own.union(*(others for others, _ in joined)), [*nodes, node]
        group_of.update(dict.fromkeys(group[0], group))
    return list({id(group): group for group in group_of.values()}.values())


def construct_reverse_graph(roots: list[Node]) -> Edges:
    """Return, for every node behind the roots, the nodes that lead to it."""
    reverse: Edges = {}
    waiting, seen = list(roots), set(roots)
    while waiting:
        node = waiting.pop()
        for after in (after for after, _ in node.next_functions if after is not None):
            reverse.setdefault(after, []).append(node)
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return reverse


def reverse_closure(
    roots: list[Node], target_nodes: set[Node], reverse_edges_dict: Edges
) -> tuple[set[Node], set[Node]]:
    """Return all nodes that lead to the roots, up to target nodes, and the target nodes met."""
    found, met = set(roots), set()
    waiting = list(roots)
    while waiting:
        for before in reverse_edges_dict.get(waiting.pop(), ()):
            if before in target_nodes:
                met.add(before)
            elif before not in found:
                waiting.append(before)
            found.add(before)
    return found, met


def _pair_up(output: Any, grad: Any) -> Iterable[tuple[Root, torch.Tensor | None]]:
    """Yield each differentiable value of a nested output with its gradient."""
    if isinstance(output, torch.Tensor | GradientEdge):
        if find_edge(output):
            if grad is not None and not isinstance(grad, torch.Tensor):
                raise MissingGradientError(f"a tensor has the gradient {type(grad).__name__}")
            yield output, grad
    elif isinstance(output, tuple | list | dict) and grad is not None:
        values, grads = _items(output), _items(grad)
        if values.keys() != grads.keys():
            raise MissingGradientError(
                f"outputs {list(values)} have gradients of another form: {map_debug_info(grad)}"
            )
        for key, value in values.items():
            yield from _pair_up(value, grads[key])


def _items(tree: Any) -> dict[Any, Any]:
    if isinstance(tree, tuple | list):
        return dict(enumerate(tree))
    return tree if isinstance(tree, dict) else {}


def _start(output: Root, grad: torch.Tensor | None) -> torch.Tensor:
    if grad is not None:
        return grad
    if not isinstance(output, torch.Tensor):
        raise MissingGradientError("a backward from a gradient edge requires output gradients")
    return torch.ones_like(output)


def _differentiate(
    roots: Sequence[Start], inputs: Sequence[Any], param_groups: Sequence[dict[str, Any]]
) -> Gradients:
    """Return the gradients of the inputs, and note what arrives at the intermediates."""
    with ExitStack() as hooks:
        for group in param_groups:
            for number, node in enumerate(group["intermediates"]):
                note = partial(operator.setitem, group["grads"], number)
                hooks.enter_context(node.register_prehook(note))
        edges, gradients = [edge for edge, _ in roots], [gradient for _, gradient in roots]
        return _autograd_grad_for_inputs(edges, inputs, gradients, True, True)


def _take_gradient(value: Any) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor) or not (value.is_leaf or value.retains_grad):
        return None
    gradient, value.grad = value.grad, None
    return gradient


def _failure(what: str, output: Any, grads: Any, values: Any) -> PipelineError:
    return PipelineError(
        f"the {what} of a stage failed (outputs: {map_debug_info(output)}, gradients: "
        f"{map_debug_info(grads)}, inputs: {map_debug_info(values)})"
    )
