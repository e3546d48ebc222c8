"""Splits a model by tracing it: at its marks, at module paths, by a policy, or by work."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn

from penstock.errors import ArgumentError, ModelError, SizeError
from penstock.splitting.by_tracing.capture.capture import Capture, capture
from penstock.splitting.by_tracing.capture.entry import Entry
from penstock.splitting.by_tracing.capture.failure import suggest_layers
from penstock.splitting.by_tracing.capture.traced_graph import tensors_by_name
from penstock.splitting.by_tracing.cut.cut import Cut, cut_graph
from penstock.splitting.by_tracing.cut.pieces import (
    GraphPiece,
    estimate_work,
    graph_pieces,
    group_pieces,
)
from penstock.splitting.by_tracing.cut.state_owners import add_state
from penstock.splitting.by_tracing.stage.graph_stage import GraphStage, StageProgram, check_names
from penstock.splitting.marks import SplitPoint, is_mark, mark_modules
from penstock.splitting.pipe import Pipe, check_complete
from penstock.torch_private import pytree

__all__ = ["Policy", "make_stage", "split_into_pieces", "split_traced"]

Policy: TypeAlias = Callable[[fx.GraphModule], fx.GraphModule]


def split_traced(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    at: Mapping[str, SplitPoint] | Policy | None = None,
    stages: int | Sequence[int] | None = None,
    weigh: Callable[[GraphPiece], float] = estimate_work,
    shared: Literal["replicate", "transmit"] = "replicate",
    dynamic: bool = True,
) -> Pipe:
    """Trace a model with an example of its arguments, and cut it into stages.

    Without `at` and `stages` it is cut at its calls of `pipe_split`. `at` says where to cut, by
    paths of modules or by a function that puts marks into the traced graph; `stages` cuts so that
    the heaviest stage is as light as possible, by what `weigh` returns for each piece of the
    graph, or is the number of pieces of each stage.

    A parameter that several stages use is held by each of them (`shared="replicate"`), or by the
    first, which sends it (`"transmit"`). Batch and sequence sizes may vary if `dynamic`.
    """
    if at is not None and stages is not None:
        raise ArgumentError(
            "give either `at`, where to cut, or `stages`, how many to make, not both"
        )
    if shared not in ("replicate", "transmit"):
        raise ArgumentError(f"shared must be 'replicate' or 'transmit' (got {shared!r})")
    check_names(model)
    paths = at if isinstance(at, Mapping) else {}
    with mark_modules(model, paths):
        traced = capture(model, args, kwargs or {}, dynamic=dynamic)
    if callable(at):
        at(traced.module)
    match stages:
        case None:
            starts = _find_marks(traced)
        case int():
            starts = group_pieces(graph_pieces(traced, stages), weigh, stages)
        case _:
            starts = _starts_of_sizes(graph_pieces(traced, len(stages)), stages)
    return _assemble(traced, cut_graph(traced, starts, shared=shared))


def split_into_pieces(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], stages: int
) -> tuple[tuple[str, ...], Pipe]:
    """Make each piece that `split_traced` would use for this many stages a stage of its own.

    Return the module that each piece begins in, and the pipe, for example to measure it.
    """
    check_names(model)
    traced = capture(model, args, kwargs, dynamic=True)
    pieces = graph_pieces(traced, stages)
    cut = cut_graph(traced, [piece.start for piece in pieces[1:]], shared="replicate")
    return tuple(piece.name for piece in pieces), _assemble(traced, cut)


def _starts_of_sizes(pieces: Sequence[GraphPiece], sizes: Sequence[int]) -> list[fx.Node]:
    """Return where each stage but the first begins, if stages have these numbers of pieces."""
    if sum(sizes) != len(pieces) or min(sizes) < 1:
        raise SizeError(
            f"the sizes of the stages must be at least 1 and add up to {len(pieces)}, the number "
            f"of pieces for {len(sizes)} stages (got {list(sizes)}, sum {sum(sizes)})"
        )
    return [pieces[first].start for first in accumulate(sizes[:-1])]


def _find_marks(traced: Capture) -> list[fx.Node]:
    marks = [node for node in traced.module.graph.nodes if is_mark(node)]
    if not marks:
        raise ModelError(
            "the traced model has no mark to cut at; call pipe_split() in its forward, give "
            f"module paths (`at`) or a number of `stages`, or {suggest_layers(traced.model)}"
        )
    return marks


def _assemble(traced: Capture, cut: Cut) -> Pipe:
    last = len(cut.graphs) - 1
    modules = [
        make_stage(
            traced,
            cut,
            index,
            traced.entry if index == 0 else None,
            traced.output_spec if index == last else None,
        )
        for index in range(last + 1)
    ]
    check_complete(traced.model, modules)
    return Pipe(tuple(modules), cut.dataflow, cut.values)


def make_stage(
    traced: Capture,
    cut: Cut,
    index: int,
    entry: Entry | None,
    output_spec: pytree.TreeSpec | None,
) -> GraphStage:
    """Make the module of one stage; `entry` is for the first, `output_spec` for the last."""
    graph = cut.graphs[index]
    attributes = _own_attributes(traced, graph)
    program = StageProgram(
        graph,
        traced.device,
        traced.device,
        {n: x for n, x in attributes.items() if isinstance(x, torch.Tensor)},
        entry,
        output_spec,
    )
    stage = GraphStage(program)
    add_state(stage, cut.owners, index)
    for name, value in attributes.items():
        if isinstance(value, nn.Module):
            stage.add_module(name, value)
    stage.training = traced.model.training
    return stage


def _own_attributes(traced: Capture, graph: fx.Graph) -> dict[str, Any]:
    """Return what a graph uses that is not in the model: constants, and nested graphs."""
    held = tensors_by_name(traced.model)
    names = {str(n.target) for n in graph.nodes if n.op == "get_attr"} - held.keys()
    return {name: getattr(traced.module, name) for name in sorted(names)}
