"""Stages of a traced model: each runs a graph, with parameters and buffers of the model."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from penstock.errors import ModelError
from penstock.splitting.by_tracing.capture.entry import Entry, pack_spec, unpack_spec
from penstock.splitting.by_tracing.capture.regions import OPEN_REGIONS, OpenRegions, open_autocast
from penstock.splitting.by_tracing.stage.graph_data import pack_graph, unpack_graph
from penstock.splitting.by_tracing.stage.random_nodes import announce_random_nodes
from penstock.torch_private import pytree

__all__ = ["GraphStage", "StageProgram", "check_names"]


@dataclass(frozen=True, eq=False)
class StageProgram:
    """What a stage runs: a graph, how its inputs are made, and the tree of its outputs.

    The first stage has an `entry`, the last one an `output_spec`. `constants` are tensors that the
    model made itself. Those on the device of tracing, the `origin`, move with the stage, and so do
    operations that make tensors.
    """

    graph: fx.Graph
    origin: torch.device
    device: torch.device
    constants: dict[str, torch.Tensor]
    entry: Entry | None = None
    output_spec: pytree.TreeSpec | None = None

    def __getstate__(self) -> dict[str, Any]:
        spec = None if self.output_spec is None else pack_spec(self.output_spec)
        return self.__dict__ | {"graph": pack_graph(self.graph), "output_spec": spec}

    def __setstate__(self, state: dict[str, Any]) -> None:
        graph, spec = unpack_graph(state["graph"]), state["output_spec"]
        whole = None if spec is None else unpack_spec(spec)
        self.__dict__.update(state | {"graph": graph, "output_spec": whole})


class GraphStage(nn.Module):
    """A stage of a traced model; the first one is called like the model.

    It can be printed, copied, pickled and moved like any module. Its `graph` is what it runs.
    """

    def __init__(self, program: StageProgram) -> None:
        super().__init__()
        self._listeners: list[tuple[Callable[[str], None], Callable[[str], None]]] = []
        self._load(program)

    def _load(self, program: StageProgram) -> None:
        self._program = program
        for name, constant in program.constants.items():
            follows = constant.device == program.origin
            self.__dict__[name] = constant.to(program.device) if follows else constant
        graph = program.graph
        for enter, leave in self._listeners:
            graph = announce_random_nodes(graph, enter, leave)
        self._run = _compile(graph)
        self._has_regions = any(
            n.op == "placeholder" and n.target == OPEN_REGIONS for n in program.graph.nodes
        )
        self.__dict__["forward"] = MethodType(_forward_like(program.entry), self)

    def announce_layers(self, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
        """Call `enter` before and `leave` after every node that draws random numbers."""
        self._listeners.append((enter, leave))
        self._load(self._program)

    @property
    def graph(self) -> fx.Graph:
        """The graph that this stage runs."""
        return self._program.graph

    def print_readable(self, print_output: bool = True) -> str:
        """Return the code of this stage, with the lines of the model that it comes from."""
        return str(fx.GraphModule(self, self.graph).print_readable(print_output=print_output))

    def _execute(self, values: list[Any]) -> Any:
        """Run the graph on its inputs."""
        if not self._has_regions:
            return self._run(self, *values)
        regions: OpenRegions = []
        try:
            return self._run(self, regions, *values)
        finally:
            while regions:
                regions.pop().__exit__(None, None, None)

    def _finish(self, output: Any) -> Any:
        """Return the output: values for other stages, or the model's own tree."""
        spec = self._program.output_spec
        return output if spec is None else pytree.tree_unflatten(list(output), spec)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the graph's inputs from the arguments of the model."""
        assert self._program.entry is not None
        return list(self._program.entry.take(args, kwargs))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped upstream
        old = self._program.device
        device = fn(torch.empty(0, device=old)).device
        if device != old:
            self._load(_move(self._program, device))
        return self

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_run", "forward", *self._program.constants}
        kept = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return kept | {"_listeners": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load(self._program)


def _forward_like(entry: Entry | None) -> Callable[..., Any]:
    """Return a `forward` with the model's signature, or one for values of other stages."""
    if entry is None:
        return _forward

    def forward(self: GraphStage, *args: Any, **kwargs: Any) -> Any:
        return self._finish(self._execute(self._enter(args, kwargs)))

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    positional = [
        parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        else parameter
        for parameter in entry.signature.parameters.values()
    ]
    signature = entry.signature.replace(parameters=[itself, *positional])
    forward.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads this
    return forward


def _forward(self: GraphStage, *values: Any) -> Any:
    return self._finish(self._execute(list(values)))


def _compile(graph: fx.Graph) -> Callable[..., Any]:
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, "<traced stage>", "exec"), names)
    function: Callable[..., Any] = names["forward"]
    return function


def _move(program: StageProgram, device: torch.device) -> StageProgram:
    """Return the same program for another device."""
    old = program.device
    graph = unpack_graph(pack_graph(program.graph))
    for node in graph.nodes:
        node.args = _replace(node.args, old, device)
        node.kwargs = _replace(node.kwargs, old, device)
        if node.target is open_autocast and node.args[1] == old.type:
            node.args = (node.args[0], device.type, *node.args[2:])
    return replace(program, graph=graph, device=device)


def _replace(value: Any, old: torch.device, new: torch.device) -> Any:
    match value:
        case torch.device():
            is_same = value.type == old.type and value.index in (None, old.index)
            return new if is_same else value
        case tuple():
            return tuple(_replace(item, old, new) for item in value)
        case list():
            return [_replace(item, old, new) for item in value]
        case dict():
            return {key: _replace(item, old, new) for key, item in value.items()}
        case _:
            return value


def check_names(model: nn.Module) -> None:
    """Raise if the model uses a name that a stage needs for itself."""
    own = {name.split(".")[0] for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    taken = own & ({*vars(GraphStage), *dir(fx.GraphModule)} | {"graph"})
    if taken:
        raise ModelError(
            f"the model calls a part of itself {', '.join(sorted(taken))}, which is a name that a "
            "traced stage uses; rename it, or split the model by layers"
        )
