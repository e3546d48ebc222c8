"""A loss inside of a model: models that compute it, and where in a graph's output it is."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx, nn

from penstock.errors import ModelError, PipelineError

__all__ = [
    "LossWrapper",
    "TrivialLossWrapper",
    "_find_loss_from_output_and_spec",
    "_find_loss_output",
]


class _NoForwardError(ModelError, NotImplementedError):
    """A model does not say how it is run; also a `NotImplementedError`, as in torch."""


class LossWrapper(nn.Module):
    """A model and its loss; a subclass says in `forward` how they are connected.

    class WithLoss(LossWrapper):
        def forward(self, x, target):
            return self.loss_fn(self.module(x), target)
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Left to subclasses."""
        raise _NoForwardError(
            f"{type(self).__name__} does not say how model and loss are connected; define forward"
        )


class TrivialLossWrapper(LossWrapper):
    """A model of one input, and a loss of its output and a target."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """Return the loss of the model's output."""
        return self.loss_fn(self.module(x), targets)


def _find_loss_from_output_and_spec(output_val: Any, spec_val: Any) -> fx.Node | None:
    """Return the node of a tree where a like tree of booleans has True, or None.

    Only a spec that is a bare False may name nothing.
    """
    if spec_val is False:
        return None
    found = [node for node in _pick(output_val, spec_val) if node is not None]
    if not found:
        raise PipelineError(f"the loss spec {spec_val!r} names no output; set one of it to True")
    return found[0]


def _pick(output: Any, spec: Any) -> Iterator[fx.Node | None]:
    match spec, output:
        case False, _:
            yield None
        case True, fx.Node():
            yield output
        case True, _:
            raise PipelineError(f"a loss is computed by the model, but the spec names {output!r}")
        case (tuple() | list(), tuple() | list()) if len(spec) == len(output):
            for value, inner in zip(output, spec, strict=True):
                yield from _pick(value, inner)
        case Mapping(), Mapping() if spec.keys() == output.keys():
            for key, inner in spec.items():
                yield from _pick(output[key], inner)
        case _:
            raise PipelineError(
                f"the loss spec {spec!r} is not like the output {output!r}; give a tree of the "
                "same structure, with True for the loss and False for the rest"
            )


def _find_loss_output(
    mod: nn.Module, g: fx.Graph, output_loss_value_spec: Any
) -> tuple[fx.Node | None, fx.Node, Any]:
    """Return the loss of a graph, its output node, and the spec that says where the loss is.

    Without a spec, it is what is called "loss" in the output, if anything is.
    """
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
