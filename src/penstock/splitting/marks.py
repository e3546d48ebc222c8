"""Marks in a model where one stage ends and the next one begins.

A mark is a call of `pipe_split()` in the model's own code, or a module's path with one side of it.
In a traced graph it is a node without inputs and outputs.
"""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import ModelError

__all__ = ["SplitPoint", "add_marks", "find_module", "is_mark", "mark_modules", "pipe_split"]

torch.library.define("penstock::pipe_split", "() -> ()")


@torch.library.impl("penstock::pipe_split", "BackendSelect")
def _do_nothing() -> None:
    return None


torch.library.register_fake("penstock::pipe_split", _do_nothing)
_MARK = torch.ops.penstock.pipe_split.default
# Otherwise a node without outputs would be removed as dead code.
fx.node.has_side_effect(_MARK)

# Torch's own marks, which models may have.
_MARKS_OF_TORCH = ("pippy._pipe_split.default", "pippy._pipe_split")


class NoSuchModuleError(ModelError, AttributeError):
    """A path leads to no module; also an `AttributeError`, as from `nn.Module.get_submodule`."""


class SplitPoint(Enum):
    """The side of a module on which to cut: `split(model, at={"head": SplitPoint.BEGINNING})`."""

    BEGINNING = 1
    END = 2


def pipe_split() -> None:
    """End a stage here; a call in a model's `forward` that does nothing until it is traced."""
    _MARK()


def is_mark(node: fx.Node) -> bool:
    """Return whether a node of a traced graph is a mark."""
    if node.op != "call_function":
        return False
    is_ours = node.target in (_MARK, pipe_split, torch.ops.penstock.pipe_split)
    name = getattr(node.target, "__name__", "")
    return is_ours or str(node.target) in _MARKS_OF_TORCH or name == pipe_split.__name__


def find_module(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path; raise with the most similar path if there is none."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if path in modules:
        return modules[path]
    near = difflib.get_close_matches(path, modules, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise NoSuchModuleError(f"the model has no module {path!r}{hint}")


@contextmanager
def mark_modules(model: nn.Module, at: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Mark these modules while the model is being traced."""
    handles = add_marks(model, at)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def add_marks(model: nn.Module, at: Mapping[str, SplitPoint]) -> list[RemovableHandle]:
    """Mark these modules until the handles are removed; if one cannot be marked, mark none."""
    modules = [find_module(model, path) for path in at]
    for path, point in at.items():
        if not isinstance(point, SplitPoint):
            raise ModelError(
                f"the split point of {path!r} must be a SplitPoint (got {point!r}); use "
                "SplitPoint.BEGINNING or SplitPoint.END"
            )
    return [
        module.register_forward_pre_hook(_mark, prepend=True)
        if point is SplitPoint.BEGINNING
        else module.register_forward_hook(_mark)
        for module, point in zip(modules, at.values(), strict=True)
    ]


def _mark(*_: Any) -> None:
    pipe_split()
