"""Owners of parameters and buffers: the stages that hold them, and the names used there.

A stage holds what its nodes use. A parameter with several names has the name of the module that
uses it there. What no node uses is held where its neighbours in the model are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from penstock.splitting.by_tracing.capture.traced_graph import module_paths, tensors_by_name

__all__ = ["StateOwners", "add_state", "find_owners"]


@dataclass(frozen=True, eq=False)
class StateOwners:
    """The names in each stage, and the name that a node uses an attribute by."""

    model: nn.Module
    names: tuple[frozenset[str], ...]
    used_as: Mapping[tuple[fx.Node, fx.Node], str]

    def is_own(self, stage: int, path: str) -> bool:
        """Return whether a module without children has all its tensors in this stage only."""
        module = self.model.get_submodule(path)
        names = _names_inside(path, module)
        others = (held for other, held in enumerate(self.names) if other != stage)
        return (
            bool(path)
            and not module._modules
            and names <= self.names[stage]
            and not any(names & held for held in others)
        )


def _names_inside(path: str, module: nn.Module) -> set[str]:
    tensors = {**module._parameters, **module._buffers}
    return {f"{path}.{name}" for name, tensor in tensors.items() if tensor is not None}


def find_owners(
    model: nn.Module,
    graph: fx.Graph,
    stages: Mapping[fx.Node, int],
    num_stages: int,
    home: Mapping[fx.Node, int],
) -> StateOwners:
    """Find the owners; attributes that have a `home` stay there and are sent to other stages."""
    tensors = tensors_by_name(model)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    held: list[set[str]] = [set() for _ in range(num_stages)]
    used_as: dict[tuple[fx.Node, fx.Node], str] = {}
    for node in graph.nodes:
        target = str(node.target)
        if node.op != "get_attr" or target not in tensors:
            continue
        for user in node.users:
            if home.get(node, stages[user]) == stages[user]:
                name = _choose_name(names[id(tensors[target])], target, user)
                used_as[node, user] = name
                held[stages[user]].add(name)
    _place_rest(tensors, names, held)
    return StateOwners(model, tuple(map(frozenset, held)), used_as)


def _choose_name(names: list[str], default: str, user: fx.Node) -> str:
    for path in reversed(module_paths(user)):
        for name in names:
            if name.rpartition(".")[0] == path:
                return name
    return default


def _place_rest(
    tensors: Mapping[str, torch.Tensor], names: Mapping[int, list[str]], held: list[set[str]]
) -> None:
    """Assign each unused name to the stage of its tensor, or of its neighbours."""
    used = sorted((name, stage) for stage, found in enumerate(held) for name in found)
    known = {name for name, _ in used}
    for name, tensor in tensors.items():
        if name not in known:
            same = [stage for other, stage in used if other in names[id(tensor)]]
            near = max(
                used, key=lambda pair: (_shared_path(name, pair[0]), -pair[1]), default=("", 0)
            )
            held[min(same) if same else near[1]].add(name)


def _shared_path(one: str, other: str) -> int:
    count = 0
    for left, right in zip(one.split(".")[:-1], other.split(".")[:-1], strict=False):
        if left != right:
            break
        count += 1
    return count


def add_state(holder: nn.Module, owners: StateOwners, stage: int) -> None:
    """Add the state that a stage holds to a module, under the model's own names.

    A module without children that only this stage uses is added as a whole, so that it can be
    called, initialised and recognised. Of other modules only the tensors are added.
    """
    for name in sorted(owners.names[stage]):
        path, _, attribute = name.rpartition(".")
        owner = owners.model.get_submodule(path)
        if owners.is_own(stage, path):
            parent, _, last = path.rpartition(".")
            _container(holder, parent.split("."))._modules.setdefault(last, owner)
        else:
            _put(_container(holder, path.split(".")), owner, attribute)


def _container(holder: nn.Module, atoms: Iterable[str]) -> nn.Module:
    for atom in atoms:
        if atom:
            holder = holder._modules.setdefault(atom, nn.Module()) or holder
    return holder


def _put(holder: nn.Module, owner: nn.Module, attribute: str) -> None:
    if attribute in owner._parameters:
        holder.register_parameter(attribute, owner._parameters[attribute])
    else:
        is_persistent = attribute not in owner._non_persistent_buffers_set
        holder.register_buffer(attribute, owner._buffers[attribute], persistent=is_persistent)
