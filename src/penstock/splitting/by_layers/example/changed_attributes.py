"""Plain attributes of units that a call changes: other stages do not have what is in them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from penstock.splitting.by_layers.hooks.inner_values import version_of
from penstock.splitting.by_layers.module_outline import plain_attributes

__all__ = ["changed_names", "look_at"]

_Look = tuple[Any, object]


def look_at(module: nn.Module) -> dict[str, _Look]:
    """The plain attributes of a module and of its parts, by name, as they are now."""
    return dict(_attributes(module))


def _attributes(module: nn.Module) -> Iterator[tuple[str, _Look]]:
    for path, inner in module.named_modules():
        for name, value in plain_attributes(inner).items():
            yield f"{path}.{name}".lstrip("."), (value, _mark(value))


def _mark(value: Any) -> object:
    """What changes if an object is changed and stays the same object."""
    match value:
        case torch.Tensor():
            return version_of(value)
        case list() | dict() | set():
            return len(value)
        case _:
            return None


def changed_names(before: Mapping[str, _Look], after: Mapping[str, _Look]) -> tuple[str, ...]:
    """The attributes that are new, are other objects, or have been added to."""
    return tuple(
        name
        for name, look in after.items()
        if name not in before or not _is_same(before[name], look)
    )


def _is_same(before: _Look, after: _Look) -> bool:
    (old, old_mark), (new, new_mark) = before, after
    is_plain = isinstance(new, bool | int | float | str) and type(old) is type(new)
    return (old is new and old_mark == new_mark) or (is_plain and bool(old == new))
