"""A loss inside of a model: where it is, its backwards in a pipe's graph, and how that is run."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument

from penstock.dropin._backward import _null_coalesce_accumulate, stage_backward
from penstock.errors import ModelError, PipelineError
from penstock.splitting.output_loss import pick
from penstock.torch_private import tree_map_only

__all__ = [
    "DetachExecutor",
    "LossWrapper",
    "TrivialLossWrapper",
    "_find_loss_from_output_and_spec",
    "_find_loss_output",
    "_insert_stage_symbolic_backward",
]


class _NoForwardError(ModelError, NotImplementedError):
    """A model does not say how it is run; also a `NotImplementedError`, as in torch."""


class LossWrapper(nn.Module):
    """A model and its loss; a subclass says in `forward` how they are connected."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.loss_fn = module, loss_fn

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Left to subclasses."""
        name = type(self).__name__
        raise _NoForwardError(f"{name} must define forward, which connects model and loss")


class TrivialLossWrapper(LossWrapper):
    """A model of one input, and a loss of its output and a target."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """Return the loss of the model's output."""
        return self.loss_fn(self.module(x), targets)


def _find_loss_from_output_and_spec(output_val: Any, spec_val: Any) -> fx.Node | None:
    """Return the node where a like tree of booleans has True; None for a bare False."""
    if spec_val is False:
        return None
    try:
        found = next(pick(output_val, spec_val, "the output"), None)
    except ModelError as error:
        raise PipelineError(str(error)) from error
    if not isinstance(found, fx.Node):
        raise PipelineError(
            f"the loss spec {spec_val!r} must name an output that the model computes (got {found})"
        )
    return found


def _find_loss_output(
    mod: nn.Module, g: fx.Graph, output_loss_value_spec: Any
) -> tuple[fx.Node | None, fx.Node, Any]:
    """Return the loss of a graph (what is called so, without a spec), its output, and the spec."""
    (output_node,) = g.find_nodes(op="output")
    output: Any = output_node.args[0]
    if isinstance(mod, TrivialLossWrapper):
        return _only(output), output_node, TrivialLossWrapper.loss_spec
    if output_loss_value_spec is None:
        if not isinstance(output, Mapping) or "loss" not in output:
            return None, output_node, None
        output_loss_value_spec = {key: key == "loss" for key in output}
    if output_loss_value_spec is True:
        output = _only(output)
    found = _find_loss_from_output_and_spec(output, output_loss_value_spec)
    return found, output_node, output_loss_value_spec


def _only(output: Any) -> Any:
    """Return the only value of an output; a pipe's graph returns a tuple of one."""
    return output[0] if isinstance(output, tuple | list) and len(output) == 1 else output


class DetachExecutor(fx.Interpreter):
    """Runs the graph of a pipe on leaves: gradients are cut between stages, as between ranks."""

    def __init__(self, module: nn.Module, garbage_collect_values: bool = True) -> None:
        super().__init__(module, garbage_collect_values)
        self._leaves: dict[torch.Tensor, torch.Tensor] = {}

    def run(self, *args: Any, **settings: Any) -> Any:
        """Run the graph on these inputs."""
        self._leaves.clear()
        return super().run(*args, **settings)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a stage on leaves."""
        leaves = tree_map_only(torch.Tensor, self._leaf_of, (args, kwargs))
        return super().call_module(target, *leaves)

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
    """Write a `stage_backward` for each stage that the loss depends on, before the output."""
    forward = list(g.nodes)
    needed = _find_needed(loss_node)
    grads: dict[fx.Node, fx.Node] = {}
    with g.inserting_before(output_node):
        for node in reversed(forward):
            if node.op == "call_function" and node.target is not operator.getitem:
                raise ModelError(f"the graph of a pipe calls stages only ({node}: {node.target})")
            if node.op == "call_module" and node in needed:
                _write_stage(g, node, needed, grads)
    return g


def _find_needed(loss: fx.Node) -> set[fx.Node]:
    needed = {loss}
    for node in reversed(loss.graph.nodes):
        needed.update(node.all_input_nodes if node in needed else ())
    return needed


def _write_stage(
    g: fx.Graph, call: fx.Node, needed: set[fx.Node], grads: dict[fx.Node, fx.Node]
) -> None:
    outputs, inputs = _outputs(call), list(call.all_input_nodes)
    used = [number for number, output in enumerate(outputs) if output in needed]
    given = {"stage_output": tuple(outputs), "output_grads": tuple(map(grads.get, outputs))}
    rest: dict[str, Argument] = {"input_values": inputs, "outputs_with_grads_idxs": used}
    backward = g.call_function(stage_backward, kwargs={**given, **rest})
    for number, value in enumerate(inputs):
        grad = g.call_function(operator.getitem, (backward, number))
        if value in grads and value.op != "placeholder":
            grad = g.call_function(_null_coalesce_accumulate, (grads[value], grad))
        grads[value] = grad


def _outputs(call: fx.Node) -> list[Any]:
    """Return the outputs of a stage by number; the only output is the call itself."""
    parts = [user for user in call.users if user.target is operator.getitem]
    items: dict[Any, fx.Node] = {part.args[1]: part for part in parts}
    return [items.get(number) for number in range(max(items) + 1)] if items else [call]
