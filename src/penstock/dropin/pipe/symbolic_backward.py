"""The backward of a pipe as part of its graph: a call per stage, from the last to the first."""

import operator
from typing import Any

from torch import fx

from penstock.dropin._backward import _null_coalesce_accumulate, stage_backward
from penstock.errors import ModelError

__all__ = ["_insert_stage_symbolic_backward"]


def _insert_stage_symbolic_backward(
    g: fx.Graph, loss_node: fx.Node, output_node: fx.Node
) -> fx.Graph:
    """Write a `stage_backward` for each stage that the loss depends on, before the output.

    A value that several stages use gets the sum of their gradients.
    """
    forward = list(g.nodes)
    needed = _find_needed(loss_node)
    grads: dict[fx.Node, fx.Node] = {}
    with g.inserting_before(output_node):
        for node in reversed(forward):
            if node.op == "call_function" and node.target is not operator.getitem:
                raise ModelError(
                    f"the graph of a pipe calls stages and takes parts of what they return, but "
                    f"{node} calls {node.target}"
                )
            if node.op == "call_module" and node in needed:
                _write_stage(g, node, needed, grads)
    return g


def _find_needed(loss: fx.Node) -> set[fx.Node]:
    """Return the loss and all that it is computed from."""
    needed: set[fx.Node] = set()
    rest = [loss]
    while rest:
        node = rest.pop()
        if node not in needed:
            needed.add(node)
            rest.extend(node.all_input_nodes)
    return needed


def _write_stage(
    g: fx.Graph, call: fx.Node, needed: set[fx.Node], grads: dict[fx.Node, fx.Node]
) -> None:
    outputs = _outputs(call)
    backward = g.call_function(
        stage_backward,
        kwargs={
            "stage_output": tuple(outputs),
            "output_grads": tuple(map(grads.get, outputs)),
            "input_values": list(call.all_input_nodes),
            "outputs_with_grads_idxs": [
                number for number, output in enumerate(outputs) if output in needed
            ],
        },
    )
    for number, value in enumerate(call.all_input_nodes):
        grad = g.call_function(operator.getitem, (backward, number))
        if value in grads and value.op != "placeholder":
            grad = g.call_function(_null_coalesce_accumulate, (grads[value], grad))
        grads[value] = grad


def _outputs(call: fx.Node) -> list[Any]:
    """Return the outputs of a stage by number; the only output is the call itself."""
    items: dict[Any, fx.Node] = {
        user.args[1]: user for user in call.users if user.target is operator.getitem
    }
    return [items.get(number) for number in range(max(items) + 1)] if items else [call]
