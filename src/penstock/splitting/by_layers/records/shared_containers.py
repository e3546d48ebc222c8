"""Dicts and lists that layers get as arguments and write to, for later layers to read.

Such a container is part of what a call returns: a stage without the layer writes the same entries
to its own container.

    shared = {}                              stage 0    stage 1
    x = layers[0](x, shared)                 writes     gets what was written with the output
    x = layers[1](x, shared)                            reads
"""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Contents", "Returned", "contents_of", "look_into", "returned_by", "write_entries"]

_Container = dict[Any, Any] | UserDict[Any, Any] | list[Any]
Given = tuple[tuple[Any, ...], dict[str, Any]]
Contents = Mapping[str, Mapping[Any, Any]]


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call returned, and the entries that it wrote, by argument and key."""

    output: Any
    entries: dict[str, dict[Any, Any]]


def _containers(given: Given) -> dict[str, _Container]:
    args, kwargs = given
    named = [*((str(number), value) for number, value in enumerate(args)), *kwargs.items()]
    return {name: value for name, value in named if isinstance(value, dict | UserDict | list)}


def contents_of(given: Given) -> Contents:
    """Return what the containers among some arguments hold now."""
    return {name: _entries(container) for name, container in _containers(given).items()}


def _entries(container: _Container) -> dict[Any, Any]:
    return dict(enumerate(container)) if isinstance(container, list) else dict(container)


def look_into(given: Given) -> Any:
    """Return arguments as a tree in which the entries of every container can be seen."""
    args, kwargs = given
    plain = [dict(v) if isinstance(v, UserDict) else v for v in (*args, *kwargs.values())]
    return tuple(plain)


def returned_by(output: Any, before: Contents, given: Given) -> Returned:
    """Return an output with the entries that are new since the call began, or are others."""
    entries: dict[str, dict[Any, Any]] = {}
    for name, now in contents_of(given).items():
        old = before.get(name, {})
        new = {key: value for key, value in now.items() if not _has(old, key, value)}
        if new:
            entries[name] = new
    return Returned(output, entries)


def _has(old: Mapping[Any, Any], key: Any, value: Any) -> bool:
    return key in old and old[key] is value


def write_entries(returned: Returned, given: Given) -> Any:
    """Write the entries of a call on another stage to the arguments here; return its output."""
    containers = _containers(given)
    for name, entries in returned.entries.items():
        container = containers[name]
        for key, value in entries.items():
            if isinstance(container, list) and key == len(container):
                container.append(value)
            else:
                container[key] = value
    return returned.output
