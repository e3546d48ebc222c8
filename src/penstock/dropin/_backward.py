"""The backward of a stage on a graph that somebody else has recorded, whole or in two halves.

`stage_backward_input` makes the input gradients, and notes what arrives where the graph branches
off to weights (see `stages.split_graph`); `stage_backward_weight` continues from there. Stages in
our own schedules split earlier and at less cost (`penstock.step.backward`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from penstock.dropin._debug import map_debug_info
from penstock.dropin.stages.split_graph import (
    Group,
    construct_reverse_graph,
    find_groups,
    get_param_groups,
    reverse_closure,
)
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
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


class MissingGradientError(ModelError, AssertionError):
    """An output has no gradient to start from, or one of another form."""


def stage_backward(
    stage_output: Any,
    output_grads: Any,
    input_values: Sequence[Any],
    outputs_with_grads_idxs: list[int] | None = None,
) -> Gradients:
    """Add to the gradients of all leaves behind an output, and return those of the inputs.

    The inputs' own `.grad` is left empty. A loss needs no gradient.
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[index] for index in outputs_with_grads_idxs]
        output_grads = [output_grads[index] for index in outputs_with_grads_idxs]
    try:
        pairs = list(_pair_up(stage_output, output_grads))
        if pairs:
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
    """Return the gradients of the inputs, and what `stage_backward_weight` needs for the rest.

    Each group holds "params" and "intermediates", nodes of the graph, and "grads": what arrived
    at each output of each intermediate.
    """
    grads = [None] * len(stage_outputs_or_loss) if output_grads is None else output_grads
    roots = [
        (_edge(output), _start(output, grad))
        for output, grad in zip(stage_outputs_or_loss, grads, strict=True)
        if _requires_gradient(output)
    ]
    wanted = [value for value in input_values if _requires_gradient(value)]
    try:
        groups = find_groups(
            [edge.node for edge, _ in roots],
            [_edge(value).node for value in wanted],
            [_edge(weight).node for weight in weights if weight.requires_grad],
        )
        param_groups = [_describe(group, roots) for group in groups]
        found = iter(_differentiate(roots, wanted, param_groups))
    except Exception as error:
        arguments = (stage_outputs_or_loss, output_grads, input_values)
        raise _failure("backward for inputs", *arguments) from error
    dinputs = tuple(next(found) if _requires_gradient(value) else None for value in input_values)
    for value, gradient in zip(input_values, dinputs, strict=True):
        _add_gradient(value, gradient)
    _let_go(stage_outputs_or_loss)
    return dinputs, param_groups


def stage_backward_weight(
    weights: Iterable[Parameter],
    param_groups: list[dict[str, Any]],
    retain_graph: bool = False,
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
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            # What comes down from one intermediate to another has been counted there already.
            handles = [_set_gradients(node, saved) for node, saved in noted]
            try:
                torch.autograd.backward(
                    edges,
                    gradients,
                    retain_graph=retain_graph,
                    inputs=[node.variable for node in group["params"]],
                )
            finally:
                _remove(handles)
    return tuple(weight.grad for weight in weights)


def _null_coalesce_accumulate(
    lhs: torch.Tensor | None, rhs: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the sum of two gradients, of which either may be missing."""
    if lhs is None or rhs is None:
        return rhs if lhs is None else lhs
    return lhs + rhs


def _autograd_grad_for_inputs(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> Gradients:
    """Return the gradients of the inputs that take one, and None for the others."""
    wanted = [value for value in inputs if _requires_gradient(value)]
    grads = [None] * len(outputs) if grad_outputs is None else grad_outputs
    pairs = [pair for pair in zip(outputs, grads, strict=True) if _requires_gradient(pair[0])]
    found: Iterable[torch.Tensor | None] = [None] * len(wanted)
    if wanted and pairs:
        roots, starts = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            roots, wanted, starts, retain_graph=retain_graph, allow_unused=allow_unused
        )
    rest = iter(found)
    return tuple(next(rest) if _requires_gradient(value) else None for value in inputs)


def _get_grad_fn_or_grad_acc(t: torch.Tensor) -> Node | None:
    """Return the node that a tensor's gradient enters by, if it takes one."""
    return _edge(t).node if _requires_gradient(t) else None


def _pair_up(output: Any, grad: Any) -> Iterable[tuple[Root, torch.Tensor | None]]:
    """Yield each differentiable value of a nested output with its gradient."""
    match output:
        case torch.Tensor() | GradientEdge():
            if _requires_gradient(output):
                if grad is not None and not isinstance(grad, torch.Tensor):
                    raise MissingGradientError(f"a tensor has the gradient {type(grad).__name__}")
                yield output, grad
        case tuple() | list() if grad is not None:
            if not isinstance(grad, tuple | list) or len(grad) != len(output):
                raise MissingGradientError(
                    f"{len(output)} outputs have gradients of another form: {map_debug_info(grad)}"
                )
            for value, part in zip(output, grad, strict=True):
                yield from _pair_up(value, part)
        case dict() if grad is not None:
            if not isinstance(grad, dict) or set(grad) != set(output):
                raise MissingGradientError(
                    f"outputs {sorted(output)} have gradients of another form: "
                    f"{map_debug_info(grad)}"
                )
            for name, value in output.items():
                yield from _pair_up(value, grad[name])
        case _:
            return


def _requires_gradient(value: object) -> bool:
    return isinstance(value, GradientEdge) or (
        isinstance(value, torch.Tensor) and value.requires_grad
    )


def _edge(value: Root) -> GradientEdge:
    return get_gradient_edge(value) if isinstance(value, torch.Tensor) else value


def _start(output: Root, grad: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient to start from: the one given, or ones for a loss."""
    if grad is not None:
        return grad
    if not isinstance(output, torch.Tensor):
        raise MissingGradientError("a backward from a gradient edge requires output gradients")
    return torch.ones_like(output)


def _describe(group: Group, roots: Sequence[tuple[GradientEdge, torch.Tensor]]) -> dict[str, Any]:
    """Return a group in torch's form; a root that leads to no input gets its own gradient."""
    grads: list[Gradients] = []
    for node in group.nodes:
        arrived = {edge.output_nr: grad for edge, grad in roots if edge.node is node}
        last = max(arrived, default=-1)
        grads.append(tuple(arrived.get(number) for number in range(last + 1)))
    # A node of a Python function does not keep itself alive; what leads to it does.
    is_python = any(isinstance(node, FunctionBase) for node in group.nodes)
    owners = [edge for edge, _ in roots] if is_python else []
    return {
        "params": group.weights,
        "intermediates": group.nodes,
        "grads": grads,
        "owners": owners,
    }


def _differentiate(
    roots: Sequence[tuple[GradientEdge, torch.Tensor]],
    wanted: Sequence[Root],
    param_groups: Sequence[dict[str, Any]],
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of the inputs, and note what arrives at the intermediates."""
    if not roots or not wanted:
        return [None] * len(wanted)
    handles = [
        _note_gradients(node, group["grads"], number)
        for group in param_groups
        for number, node in enumerate(group["intermediates"])
    ]
    edges, gradients = zip(*roots, strict=True)
    try:
        found: Gradients = torch.autograd.grad(
            edges, cast(Any, wanted), gradients, retain_graph=True, allow_unused=True
        )
        return found
    finally:
        _remove(handles)


def _note_gradients(node: Node, grads: list[Gradients], number: int) -> RemovableHandle:
    def note(arrived: Gradients) -> None:
        grads[number] = tuple(arrived)

    return node.register_prehook(note)


def _set_gradients(node: Node, saved: Gradients) -> RemovableHandle:
    def replace(_: object) -> Gradients:
        return saved

    return node.register_prehook(replace)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _take_gradient(value: Any) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor) or not (value.is_leaf or value.retains_grad):
        return None
    gradient, value.grad = value.grad, None
    return gradient


def _add_gradient(value: Any, gradient: torch.Tensor | None) -> None:
    if gradient is not None and (value.is_leaf or value.retains_grad):
        value.grad = gradient if value.grad is None else value.grad + gradient


def _let_go(outputs: Sequence[Root]) -> None:
    """Cut the outputs off from the graph, as far as that can be done in place."""
    for output in outputs:
        if isinstance(output, torch.Tensor) and not output._is_view():
            output.detach_()


def _failure(what: str, output: Any, grads: Any, values: Any) -> PipelineError:
    return PipelineError(
        f"the {what} of a stage failed (outputs: {map_debug_info(output)}, gradients: "
        f"{map_debug_info(grads)}, inputs: {map_debug_info(values)})"
    )
