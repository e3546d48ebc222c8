"""Traces and cuts a model for a pipe; sizes stay free where nothing but tensors crosses then."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from penstock.dropin.pipe.cut_form import CutForm, give_form
from penstock.errors import ModelError, PipelineError
from penstock.splitting.by_tracing.capture.capture import Capture, capture
from penstock.splitting.by_tracing.cut.assignment import is_scalar
from penstock.splitting.by_tracing.cut.cut import Cut, cut_graph
from penstock.splitting.by_tracing.stage.graph_stage import check_names
from penstock.splitting.marks import SplitPoint, is_mark, mark_modules
from penstock.torch_private import pytree

__all__ = ["Traced", "trace_and_cut"]


@dataclass(frozen=True, eq=False)
class Traced:
    """A cut model, and the tree that the whole model returns."""

    form: CutForm
    output_spec: pytree.TreeSpec


class _TracingError(ModelError, PipelineError):
    """A model cannot be traced or cut; also a `RuntimeError`, as in torch."""


def trace_and_cut(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    at: Mapping[str, SplitPoint],
    policy: Callable[[fx.GraphModule], fx.GraphModule] | None,
    transmits: bool,
) -> Traced:
    """Trace a model and cut it at its marks, at those of `at`, and at those of the policy."""

    def cut(*, dynamic: bool) -> tuple[Capture, Cut]:
        with mark_modules(model, at):
            traced = capture(model, args, kwargs, dynamic=dynamic)
        if policy is not None:
            traced = replace(traced, module=policy(traced.module))
        marks = [node for node in traced.module.graph.nodes if is_mark(node)]
        return traced, cut_graph(traced, marks, shared="transmit" if transmits else "replicate")

    try:
        check_names(model)
        traced, found = _try_with_free_sizes(cut)
    except ModelError as error:
        raise _TracingError(str(error)) from error
    return Traced(give_form(traced, found, args, kwargs), traced.output_spec)


def _try_with_free_sizes(cut: Callable[..., tuple[Capture, Cut]]) -> tuple[Capture, Cut]:
    """Cut with sizes left free; if that fails, or numbers would have to cross, with fixed ones."""
    try:
        traced, found = cut(dynamic=True)
    except ModelError:
        return cut(dynamic=False)
    if any(is_scalar(node) for graph in found.graphs for node in _crossing(graph)):
        return cut(dynamic=False)
    return traced, found


def _crossing(graph: fx.Graph) -> list[fx.Node]:
    (output,) = graph.find_nodes(op="output")
    placeholders = graph.find_nodes(op="placeholder")
    return [*output.all_input_nodes, *placeholders]
