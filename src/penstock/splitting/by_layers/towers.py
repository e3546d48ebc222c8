"""Finds a model's lists of layers: where most of its parameters are, one list per tower.

model
  vision_tower.encoder.layers   a list of layers, whose own lists (experts) are not looked at
  projector                     no list
  language_model.layers         a list of layers
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from penstock.errors import ModelError

__all__ = ["count_lists", "find_towers"]

# A list with fewer than this part of the parameters of the largest is not one of layers to cut
# between, if the others have enough: heads, projections, a few convolutions before the layers.
_LEAST_PART = 0.1


@dataclass(frozen=True, slots=True)
class _List:
    path: str
    module: nn.Module
    size: int

    @property
    def count(self) -> int:
        return len(self.module._modules)


def find_towers(model: nn.Module, stages: int, *, without: Collection[str] = ()) -> list[str]:
    """Return the paths of the model's lists of layers, in the order of registration.

    Together they have a layer for each stage. Lists inside of layers, and containers that run
    their modules themselves, count only if there is no other way. Lists `without` never count, but
    those inside of them do.
    """
    found = list(_kept(_outermost(model, ""), without))
    while True:
        lists = [one for one in found if isinstance(one.module, nn.ModuleList)]
        for chosen in (lists, found):
            towers = _largest(chosen, stages)
            if sum(one.count for one in towers) >= stages:
                return [one.path for one in towers]
        inner = [deeper for one in found for deeper in _kept(_inside(one), without)]
        if not inner:
            raise ModelError(
                f"the model has no list of {stages} layers or more"
                f"{_describe(found)}; name the layers to cut between (layers='path.of.the.list'),"
                " use fewer stages, or give an example to split it by tracing"
            )
        found = inner


def count_lists(model: nn.Module) -> int:
    """Return how many lists of modules of a kind a model has that are in no other."""
    return sum(1 for _ in _outermost(model, ""))


def _largest(lists: list[_List], stages: int) -> list[_List]:
    """Return the lists with most of the parameters, and smaller ones until there are enough."""
    by_size = sorted(lists, key=lambda one: one.size, reverse=True)
    chosen: list[_List] = []
    for one in by_size:
        is_large = one.size >= _LEAST_PART * by_size[0].size
        if is_large or sum(other.count for other in chosen) < stages:
            chosen.append(one)
    return [one for one in lists if one in chosen]


def _outermost(module: nn.Module, path: str) -> Iterator[_List]:
    """Yield the lists of modules of a kind that are in no other, in order."""
    if _is_list_of_layers(module):
        yield _List(path, module, _size(module))
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _outermost(child, f"{path}.{name}".lstrip("."))


def _kept(lists: Iterable[_List], without: Collection[str]) -> Iterator[_List]:
    for one in lists:
        if one.path in without:
            yield from _kept(_inside(one), without)
        else:
            yield one


def _inside(one: _List) -> Iterator[_List]:
    for name, child in one.module._modules.items():
        if child is not None:
            yield from _outermost(child, f"{one.path}.{name}".lstrip("."))


def _is_list_of_layers(module: nn.Module) -> bool:
    """Return whether a module is a list of modules, at least two of which are of one class."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    kinds = [type(child) for child in module._modules.values()]
    return len(kinds) > len(set(kinds)) and _size(module) > 0


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _describe(lists: list[_List]) -> str:
    known = ", ".join(f"{one.path!r} has {one.count}" for one in lists)
    return f" ({known})" if known else ""
