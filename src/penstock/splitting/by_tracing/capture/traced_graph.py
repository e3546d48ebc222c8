"""Converts the graph of `torch.export`, in which parameters are inputs, to one with attributes.

The exported model is a part of a larger one, so its names begin with `model.`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from penstock.errors import ModelError
from penstock.splitting.by_tracing.capture.regions import inline_regions

__all__ = ["build_graph", "module_paths", "tensors_by_name", "user_inputs"]

_PREFIX = "model."
_PATHS = "module_paths"


def user_inputs(program: ExportedProgram) -> list[fx.Node]:
    """Return the inputs of an exported graph that the model is called with."""
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    specs = zip(placeholders, program.graph_signature.input_specs, strict=True)
    return [node for node, spec in specs if spec.kind is InputKind.USER_INPUT]


def tensors_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of a model under each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def build_graph(
    model: nn.Module, program: ExportedProgram, names: Iterable[str]
) -> fx.GraphModule:
    """Return the graph with parameters, buffers and constants as attributes, not as inputs."""
    graph = program.graph
    for node, name in zip(user_inputs(program), names, strict=True):
        node.target = re.sub(r"\W+", "_", name).strip("_")
    known = tensors_by_name(model)
    attributes: dict[str, Any] = dict(program.graph_module.named_children())
    nodes: dict[int, fx.Node] = {}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            continue
        name, tensor = _find_tensor(program, known, spec)
        attributes[name] = tensor
        if id(tensor) not in nodes:
            with graph.inserting_after(placeholders[-1]):
                nodes[id(tensor)] = graph.create_node("get_attr", name)
            nodes[id(tensor)].meta = node.meta
        node.replace_all_uses_with(nodes[id(tensor)])
        graph.erase_node(node)
    module = fx.GraphModule(attributes, graph)
    inline_regions(module)
    _tidy(module.graph)
    module.recompile()
    return module


def _find_tensor(
    program: ExportedProgram, known: Mapping[str, torch.Tensor], spec: Any
) -> tuple[str, Any]:
    name = str(spec.target).removeprefix(_PREFIX)
    match spec.kind:
        case InputKind.PARAMETER | InputKind.BUFFER if name in known:
            return name, known[name]
        case InputKind.CONSTANT_TENSOR:
            return f"_constant_{name.replace('.', '_')}", program.constants[spec.target]
        case _:
            raise ModelError(
                f"the model uses {name} ({spec.kind.name.lower()}), which a traced stage cannot "
                "hold; split the model by layers"
            )


def _tidy(graph: fx.Graph) -> None:
    """Add to each node the modules that it was traced in; drop unused nodes."""
    for node in reversed(list(graph.nodes)):
        stack = node.meta.get("nn_module_stack") or {}
        paths = (str(path) for path, *_ in stack.values())
        node.meta[_PATHS] = tuple(
            dict.fromkeys(p.removeprefix(_PREFIX) for p in paths if p.startswith(_PREFIX))
        )
        is_assertion = str(node.target) == "aten._assert_tensor_metadata.default"
        is_dead_size = isinstance(node.meta.get("val"), torch.SymInt) and not node.users
        is_dead_state = node.op == "get_attr" and not node.users
        if is_assertion or is_dead_size or is_dead_state:
            graph.erase_node(node)


def module_paths(node: fx.Node) -> tuple[str, ...]:
    """Return the modules that a node was traced in, from the outermost."""
    paths: tuple[str, ...] = node.meta.get(_PATHS, ())
    return paths
