"""Units: the modules that a split by layers assigns to stages, which are layers and others.

model             container: its Python code runs on every stage
  embed_tokens    unit, before the layers
  layers          list
    0 ... 31      units: the layers
  norm            unit, after the layers
  rotary_emb      free: it has nothing to train or save, so every stage has a copy
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

    `layer` is its number among the layers, or None. `after` is the number of layers that the model
    registers before it.
    """

    module: nn.Module = field(repr=False)
    paths: tuple[str, ...]
    layer: int | None
    after: int

    @property
    def path(self) -> str:
        """The first of its paths, by which it is known."""
        return self.paths[0]


@dataclass(frozen=True, slots=True)
class Units:
    """All units of a model, its containers, and the layers in order.

    A container with several paths is known by the first of them; `aliases` maps the others to it.
    """

    units: tuple[Unit, ...]
    containers: tuple[str, ...]
    layers: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def find(self, path: str) -> Unit | None:
        """Return the unit at this path, or None."""
        return next((unit for unit in self.units if path in unit.paths), None)

    def find_container(self, path: str) -> str | None:
        """Return the first path of the container at this path, or None."""
        path = self.aliases.get(path, path)
        return path if path in self.containers else None


def find_units(model: nn.Module, lists: Sequence[str]) -> Units:
    """Return the units of a model whose layers are the children of these modules, in order."""
    paths = [_find_list(model, name) for name in lists]
    layers = [f"{p}.{name}".lstrip(".") for p in paths for name, _ in _children(model, p)]
    if not layers:
        raise ModelError(f"layers must name modules with children (got {_quote(lists)})")
    containers = {prefix for path in paths for prefix in _prefixes(path)}
    if nested := containers.intersection(layers):
        raise ModelError(
            f"a layer must not hold another list of layers (got {sorted(nested)[0]!r})"
        )
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
    """A walk through a model that finds its containers, and what is in them.

    Containers are the modules around the layers, and modules without a forward, such as a list of
    norms beside the list of layers.
    """

    model: nn.Module
    layers: Sequence[str]
    around: set[nn.Module]
    paths: dict[nn.Module, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def walk(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield the layers and other modules with state, in the order of registration."""
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
    """Return whether a module has something to train or to save."""
    return any(True for _ in module.parameters()) or bool(module.state_dict())


def _belongs_to_next(model: nn.Module, path: str, lists: Sequence[str], passed: int) -> bool:
    """Return whether a unit between two lists is beside the second only, and so belongs to it."""
    end = 0
    for previous, following in pairwise(lists):
        end += sum(1 for _ in _children(model, previous))
        if passed == end:
            parent = path.rpartition(".")[0]
            return parent in _prefixes(following) and parent not in _prefixes(previous)
    return False


def _children(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Return the children of a module, a shared one under each of its names."""
    return (
        (name, child)
        for name, child in model.get_submodule(path)._modules.items()
        if child is not None
    )


def _prefixes(path: str) -> list[str]:
    """Return a path and the paths of all modules around it."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def _find_list(model: nn.Module, name: str) -> str:
    """Return the path of a list of layers, which may be given by its end if that is unique."""
    paths: list[str] = [path for path, _ in model.named_modules()]
    if name in paths:
        return name
    matches = [path for path in paths if path.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ModelError(
            f"layers must name one module (got {name!r}, the end of {_quote(matches)}); give a "
            "whole path"
        )
    lists = [p for p, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    close = get_close_matches(name, lists, n=3, cutoff=0.3) or lists[:3]
    hint = f"; its lists of modules are {_quote(close)}" if close else ""
    raise ModelError(f"the model has no module {name!r}{hint}")


def _quote(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
