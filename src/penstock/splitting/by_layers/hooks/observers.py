"""Finds hooks that only observe a model: the model cannot use what they collect.

A hook that reads values cannot be called on a stage without them. If the model cannot reach
anything that the hook can write to, the hook may be left out there.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["only_observes"]

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    ModuleType,
    CodeType,
    BuiltinFunctionType,
    torch.Tensor,
    torch.dtype,
    torch.device,
    torch.Size,
)
_STATE = frozenset(vars(nn.Module()))
_COLLECTIONS = (list, tuple, set, frozenset, deque)


def only_observes(hook: Any, modules: Iterable[nn.Module]) -> bool:
    """Return whether the model, which is made of these modules, cannot notice what a hook does.

    If in doubt, it can: a hook that refers to a module of the model, or to a global that can be
    written to, counts as a part of the model.
    """
    known = set(modules)
    held = (value for module in known for value in _attributes(module))
    within_reach = {id(found) for found in _reach(held)}
    for found in _reach([hook]):
        is_shared = isinstance(found, ContextVar | nn.Module) or id(found) in within_reach
        if is_shared or (isinstance(found, FunctionType) and _has_mutable_globals(found)):
            return False
    return True


def _attributes(module: nn.Module) -> Iterator[Any]:
    """Return what a module has besides its parameters, parts and hooks."""
    return (value for name, value in vars(module).items() if name not in _STATE)


def _reach(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield all that can be written to from here, without entering modules or our objects."""
    waiting, seen = list(roots), set()
    while waiting:
        found = waiting.pop()
        if isinstance(found, _PLAIN) or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        is_ours = type(found).__module__.startswith("penstock.")
        if not isinstance(found, nn.Module) and not is_ours:
            waiting.extend(_inside(found))


def _inside(found: Any) -> list[Any]:
    match found:
        case dict():
            return list(found.values())
        case partial():
            return [found.func, *found.args, *found.keywords.values()]
        case MethodType():
            return [found.__self__, found.__func__]
        case FunctionType():
            return [*_contents(found), *(found.__defaults__ or ())]
        case _ if isinstance(found, _COLLECTIONS):
            return list(found)
        case _:
            return list(getattr(found, "__dict__", {}).values())


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is still empty
            continue


def _has_mutable_globals(function: FunctionType) -> bool:
    names = (name for code in _codes(function.__code__) for name in code.co_names)
    values = (function.__globals__.get(name) for name in names)
    return any(not isinstance(value, (*_PLAIN, FunctionType)) for value in values)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
