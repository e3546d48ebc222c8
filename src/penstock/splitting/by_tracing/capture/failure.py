"""Explains why a model could not be traced: the module, the line, and what works instead."""

import traceback
from collections.abc import Iterator
from types import FrameType

from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from penstock.splitting.by_tracing.capture.known_values import RandomPathError
from penstock.splitting.by_tracing.capture.user_code import user_line
from penstock.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

__all__ = ["explain_failure", "suggest_layers"]


# What torch says, beside a request to report it, of a constant that has no value after the trace.
_LOST_CONSTANT = "fake tensor in the exported program constant's list"


def explain_failure(model: nn.Module, error: BaseException) -> str:
    """Return the message for an error that was raised while the model was traced."""
    frames = list(_frames(error))
    paths = {id(module): path for path, module in model.named_modules()}
    place = next(
        (paths[id(f.f_locals["self"])] for f, _ in reversed(frames) if _is_module(f, paths)), ""
    )
    module = model.get_submodule(place)
    where = f"{place!r} ({type(module).__name__})" if place else type(module).__name__
    advice = suggest_layers(model)
    line = user_line(reversed(frames))
    if isinstance(error, RandomPathError):
        # The comparison names the setting; its result may be used on a later line.
        line, advice = error.place, f"use 0 instead of {error.number} there, or {advice}"
    return (
        f"the model cannot be traced: {_reason(error)}, in {where}"
        f"{f' at {line}' if line else ''}; {advice}"
    )


def suggest_layers(model: nn.Module) -> str:
    """Return the call that splits a model by its largest list of layers, as advice."""
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
    }
    if not lists:
        return "put its layers into an nn.ModuleList and split it by layers"
    path = max(lists, key=lambda path: (_count(lists[path]), len(lists[path])))
    stages = min(4, len(lists[path]))
    return f'split it by layers: split(model, layers="{path}", stages={stages})'


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    yield from traceback.walk_tb(error.__traceback__)


def _is_module(frame: FrameType, paths: dict[int, str]) -> bool:
    return id(frame.f_locals.get("self")) in paths


def _reason(error: BaseException) -> str:
    match error:
        case GuardOnDataDependentSymNode() | DataDependentOutputException():
            return "its path depends on the values of a tensor"
        case DynamicOutputShapeException():
            return "the size of a tensor depends on the values of another"
        case RandomPathError():
            return f"its path depends on a random number, which it compares with {error.number}"
        case UnsupportedOperatorException():
            return f"{error.func} does not define the shape of its result"
        case RuntimeError() if _LOST_CONSTANT in str(error):
            return "torch.export loses the value of a constant that it makes in its forward"
        case _:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
