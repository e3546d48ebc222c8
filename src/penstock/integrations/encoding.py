"""Values that processes share, taken apart into plain data and tensors, and never pickled.

    number, string, None, tensor     themselves
    list, tuple, dict, path          ["list", children], ["tuple", children], ...
    dataclass, named tuple, mapping  ["class", module, name, fields, items]

A class travels as its name. It is found again among what the receiving process has imported, and
its constructor is not called.
"""

import sys
from collections import UserDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from penstock.errors import BoundaryError
from penstock.tensors.plain import is_plain, plain_value

__all__ = ["decode", "encode"]

# In place of a field that is the item of this name, as in the outputs of transformers.
_IS_ITEM = ["item"]


def encode(value: Any, place: str) -> Any:
    """Return a value as plain data and tensors; `place` is what errors call it.

    >>> encode({"n": (1, None)}, "outputs")
    ['dict', [['n', ['tuple', [1, None]]]]]
    """
    match value:
        case None | bool():
            return value
        # Enums too are sent as what they are kinds of.
        case int():
            return int(value)
        case float():
            return float(value)
        case str():
            return str.__str__(value)
        case np.generic():
            return encode(value.item(), place)
        case PurePath():
            return ["path", str(value)]
        case torch.Tensor():
            return _encode_tensor(value, place)
        case list():
            return ["list", _encode_all(value, place)]
        case tuple() if not hasattr(value, "_fields"):
            return ["tuple", _encode_all(value, place)]
        case _ if type(value) is dict:
            return ["dict", _encode_items(value, place)]
        case _:
            return _encode_object(value, place)


def _encode_tensor(tensor: torch.Tensor, place: str) -> torch.Tensor:
    value = plain_value(tensor.detach())
    if not is_plain(value):
        what = f"a {type(value).__name__} of layout {value.layout} on {value.device.type}"
        raise BoundaryError(
            f"{place} must be a plain, dense tensor with values (got {what}); convert it"
        )
    return value


def _encode_all(values: list[Any] | tuple[Any, ...], place: str) -> list[Any]:
    return [encode(child, f"{place}[{number}]") for number, child in enumerate(values)]


def _encode_items(values: Mapping[Any, Any], place: str) -> list[Any]:
    for key in values:
        if not isinstance(key, str | int | float | None):
            raise BoundaryError(f"{place} must have plain keys (got {key!r}); use strings")
    return [[encode(key, place), encode(v, f"{place}[{key!r}]")] for key, v in values.items()]


def _encode_object(value: Any, place: str) -> list[Any]:
    kind = type(value)
    if not _is_known_kind(kind):
        raise BoundaryError(
            f"{place} must be a tensor, number, string or None, or a list, tuple, dict, named "
            f"tuple or dataclass of them (got {kind.__name__}); return one of these"
        )
    if _find_class(kind.__module__, kind.__qualname__) is not kind:
        raise BoundaryError(
            f"{place} must be of a class that other processes find by its name (got "
            f"{kind.__qualname__}); define it at the top of a module"
        )
    items = value if isinstance(value, dict | UserDict) else {}
    own = []
    for name in _fields_of(kind):
        # A field may have no value.
        if not hasattr(value, name):
            continue
        child = getattr(value, name)
        is_item = name in items and items[name] is child
        own.append([name, _IS_ITEM if is_item else encode(child, f"{place}.{name}")])
    return ["class", kind.__module__, kind.__qualname__, own, _encode_items(items, place)]


def _fields_of(kind: type) -> list[str]:
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    return list(getattr(kind, "_fields", ()))


def _is_known_kind(kind: Any) -> bool:
    """Whether a class has no more in it than its fields and items."""
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named_tuple or is_dataclass(kind) or issubclass(kind, dict | UserDict)


def _find_class(module: str, name: str) -> type | None:
    """Return a class that this process has imported, without importing or computing anything."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def decode(data: Any) -> Any:
    """Return the value of what `encode` has made, which another process may have sent."""
    match data:
        case None | bool() | int() | float() | str() | torch.Tensor():
            return data
        case ["list", [*children]]:
            return [decode(child) for child in children]
        case ["tuple", [*children]]:
            return tuple([decode(child) for child in children])
        case ["dict", [*items]]:
            return _decode_items(items)
        case ["path", str(path)]:
            return Path(path)
        case ["class", str(module), str(name), [*own], [*items]]:
            return _decode_object(module, name, own, _decode_items(items))
        case _:
            raise BoundaryError(
                f"a value of another process must be what was encoded (got {data!r})"
            )


def _decode_items(items: list[Any]) -> dict[Any, Any]:
    return {decode(key): decode(child) for key, child in items}


def _decode_object(module: str, name: str, own: list[Any], items: dict[Any, Any]) -> Any:
    kind: Any = _find_class(module, name)
    if kind is None or not _is_known_kind(kind):
        raise BoundaryError(
            f"a value of another process must be of a class that this one has imported (got "
            f"{module}.{name}); import it in every process"
        )
    values = {key: items[key] if child == _IS_ITEM else decode(child) for key, child in own}
    if issubclass(kind, tuple):
        return tuple.__new__(kind, [values[key] for key in _fields_of(kind)])
    made = kind.__new__(kind)
    if issubclass(kind, UserDict):
        made.data = {}
    for key, child in items.items():
        made[key] = child
    for key in _fields_of(kind):
        if key in values:
            # It may be frozen.
            object.__setattr__(made, key, values[key])
    return made
