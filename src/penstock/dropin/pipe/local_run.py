"""A pipe in one process: stages on leaves, and backwards as calls in the graph, last to first."""

import operator
from typing import Any

import torch
from torch import fx, nn

from penstock.dropin._backward import _null_coalesce_accumulate, stage_backward
from penstock.errors import ModelError
from penstock.torch_private import tree_map_only

__all__ = ["DetachExecutor", "_insert_stage_symbolic_backward"]


class DetachExecutor(fx.Interpreter):
    """Runs the graph of a pipe with gradients cut between stages, as they are between ranks.

    Each stage is given leaves, one for each value that takes a gradient, and the backwards in the
    graph get the leaves in place of the values.
    """

    def __init__(self, module: nn.Module, garbage_collect_values: bool = True) -> None:
        super().__init__(module, garbage_collect_values)
        self._leaves: dict[torch.Tensor, torch.Tensor] = {}

    def run(self, *args: Any, **settings: Any) -> Any:
        """Run the graph on these inputs."""
        self._leaves.clear()
        return super().run(*args, **settings)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a stage on leaves."""
        return super().call_module(
            target, *tree_map_only(torch.Tensor, self._leaf_of, (args, kwargs))
        )

    def _leaf_of(self, value: torch.Tensor) -> torch.Tensor:
        if not value.requires_grad:
            return value
        return self._leaves.setdefault(value, value.detach().requires_grad_())

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Take a part of an output, or run a backward down to the leaves of its stage."""
        if target is stage_backward:
            leaves = [self._leaves.get(value, value) for value in kwargs["input_values"]]
            kwargs = {**kwargs, "input_values": leaves}
        return super().call_function(target, args, kwargs)


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
