"""Plain attributes of units that a call changes, so that other stages do not have their values."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from penstock.splitting.by_layers.hooks.inner_values import version_of
from penstock.splitting.by_layers.module_description import plain_attributes

__all__ = ["changed_names", "read_attributes"]

_Snapshot = tuple[Any, object]


def read_attributes(module: nn.Module) -> dict[str, _Snapshot]:
    """Return the present plain attributes of a module and of its parts, by name."""
    return dict(_attributes(module))


def _attributes(module: nn.Module) -> Iterator[tuple[str, _Snapshot]]:
    for path, inner in module.named_modules():
        for name, value in plain_attributes(inner).items():
            yield f"{path}.{name}".lstrip("."), (value, _mark(value))


def _mark(value: Any) -> object:
    """Return something that differs after an object was changed in place."""
    match value:
        case torch.Tensor():
            return version_of(value)
        case list() | dict() | set():
            return len(value)
        case _:
            return None


def changed_names(
    before: Mapping[str, _Snapshot], after: Mapping[str, _Snapshot]
) -> tuple[str, ...]:
    """Return the attributes that are new, are other objects, or were changed in place."""
    return tuple(
        name
        for name, snapshot in after.items()
        if name not in before or not _is_same(before[name], snapshot)
    )


def _is_same(before: _Snapshot, after: _Snapshot) -> bool:
    (old, old_mark), (new, new_mark) = before, after
    is_plain = isinstance(new, bool | int | float | str) and type(old) is type(new)
    return (old is new and old_mark == new_mark) or (is_plain and bool(old == new))
