"""The modules that a split by layers deals out: layers, and whatever stands beside them.

model             container: its Python code runs on every stage
  embed_tokens    unit, before the layers
  layers          list
    0 ... 31      units: the layers
  norm            unit, after the layers
  rotary_emb      free: it has nothing to train or save, so every stage has it
lm_head           unit, after the layers
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise

from torch import nn

from penstock.errors import ModelError

__all__ = ["Unit", "Units", "find_units"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that is on one stage as a whole; a shared one has several paths.

    `layer` is its number among the layers. For any other unit, `after` is how many layers come
    before it by the order in which the model registers its modules.
    """

    module: nn.Module = field(repr=False)
    paths: tuple[str, ...]
    layer: int | None
    after: int

    @property
    def path(self) -> str:
        """The first of its paths, which stands for it."""
        return self.paths[0]


@dataclass(frozen=True, slots=True)
class Units:
    """All units of a model, its containers, and the layers in order.

    A container that the model has under several paths is named by the first of them; `aliases`
    leads there from the others.
    """

    units: tuple[Unit, ...]
    containers: tuple[str, ...]
    layers: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def find(self, path: str) -> Unit | None:
        """The unit at this path, if there is one."""
        return next((unit for unit in self.units if path in unit.paths), None)

    def find_container(self, path: str) -> str | None:
        """The first path of the container at this path, if there is one."""
        path = self.aliases.get(path, path)
        return path if path in self.containers else None


def find_units(model: nn.Module, lists: Sequence[str]) -> Units:
    """The units of a model whose layers are the children of these modules, list after list."""
    paths = [_find_list(model, name) for name in lists]
    layers = [f"{p}.{name}".lstrip(".") for p in paths for name, _ in _children(model, p)]
    if not layers:
        raise ModelError(f"{_quote(lists)} holds no layers")
    containers = {prefix for path in paths for prefix in _prefixes(path)}
    if nested := containers.intersection(layers):
        raise ModelError(f"{sorted(nested)[0]!r} is a layer and holds another list of layers")
    survey = _Survey(model, layers, {model.get_submodule(path) for path in containers})
    found: dict[nn.Module, Unit] = {}
    passed = 0
    for path, module in survey.walk(""):
        layer = layers.index(path) if path in layers else None
        if layer is not None:
            passed = layer + 1
        after = passed + _belongs_to_next(model, path, paths, passed)
        known = found.get(module, Unit(module, (), layer, after))
        first = known.layer if known.layer is not None else layer
        found[module] = Unit(module, (*known.paths, path), first, known.after)
    return Units(
        tuple(found.values()), tuple(survey.paths.values()), tuple(layers), survey.aliases
    )


@dataclass(slots=True)
class _Survey:
    """A walk through a model: which modules are containers, and what stands in them.

    Besides what lies around the layers, a module without a forward is a container: nobody calls
    it, as with a list of norms that stands beside the list of layers.
    """

    model: nn.Module
    layers: Sequence[str]
    around: set[nn.Module]
    paths: dict[nn.Module, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def walk(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """The layers and whatever else holds state, in the order of registration."""
        self.paths[self.model.get_submodule(path)] = path
        for name, child in _children(self.model, path):
            inner = f"{path}.{name}".lstrip(".")
            if child in self.paths:
                self.aliases[inner] = self.paths[child]
            elif inner in self.layers:
                yield inner, child
            elif child in self.around or (_is_never_called(child) and _has_state(child)):
                yield from self.walk(inner)
            elif _has_state(child):
                yield inner, child


def _is_never_called(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _has_state(module: nn.Module) -> bool:
    """Whether there is something to train or to save."""
    return any(True for _ in module.parameters()) or bool(module.state_dict())


def _belongs_to_next(model: nn.Module, path: str, lists: Sequence[str], passed: int) -> bool:
    """Whether a unit between two lists stands beside the second only, and so goes with it."""
    end = 0
    for previous, following in pairwise(lists):
        end += sum(1 for _ in _children(model, previous))
        if passed == end:
            parent = path.rpartition(".")[0]
            return parent in _prefixes(following) and parent not in _prefixes(previous)
    return False


def _children(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module, a shared one under each of its names."""
    return (
        (name, child)
        for name, child in model.get_submodule(path)._modules.items()
        if child is not None
    )


def _prefixes(path: str) -> list[str]:
    """A path and all that it lies in."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def _find_list(model: nn.Module, name: str) -> str:
    """The path of a list of layers, which may be given by its end alone if there is only one."""
    paths: list[str] = [path for path, _ in model.named_modules()]
    if name in paths:
        return name
    matches = [path for path in paths if path.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ModelError(
            f"{name!r} is the end of several paths: {_quote(matches)}; name one whole"
        )
    lists = [p for p, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    close = get_close_matches(name, lists, n=3, cutoff=0.3) or lists[:3]
    hint = f"; lists of modules in it are {_quote(close)}" if close else ""
    raise ModelError(f"the model has no module {name!r} to take layers from{hint}")


def _quote(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
