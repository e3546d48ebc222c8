"""A case by name: one of ours, or what a function of the user returns."""

from collections.abc import Callable, Sequence
from importlib import import_module
from traceback import format_exc
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.tools.verify.case import Case
from penstock.tools.verify.gpt import gpt_case
from penstock.tools.verify.mlp import mlp_case

__all__ = ["MODELS", "load_case"]

MODELS: dict[str, Callable[..., Case]] = {"mlp": mlp_case, "gpt": gpt_case}

# The rows of a microbatch of our own models, unless the caller gives the rows of the batch.
_ROWS_PER_MICROBATCH = 2


def load_case(name: str, num_stages: int, *, microbatches: int, rows: int | None) -> Case:
    """Return the case of this name, the same at every call.

    `rows` is for our own models. `module:function` imports the module, and so runs its code.
    """
    torch.manual_seed(0)
    if name in MODELS:
        total = _ROWS_PER_MICROBATCH * microbatches if rows is None else rows
        return MODELS[name](num_stages, rows=total)
    if rows is not None:
        raise ModelError(
            f"rows must be left out for {name}, which brings its own batch (got {rows})"
        )
    case = _as_case(name, _call(name, _find_function(name), num_stages))
    if len(case.stages) != num_stages:
        raise ModelError(f"{name} must return {num_stages} stages (got {len(case.stages)})")
    return case


def _find_function(name: str) -> Callable[[int], Any]:
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ModelError(
            f"not a model: {name!r}; use {', '.join(MODELS)}, or module:function for your own"
        )
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ModelError(f"cannot import {module_name!r}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(f"{module_name} has no function {function_name!r}")
    found: Callable[[int], Any] = function
    return found


def _call(name: str, function: Callable[[int], Any], num_stages: int) -> Any:
    try:
        return function(num_stages)
    except Exception as error:
        raise ModelError(
            f"{name} failed when asked for {num_stages} stages\n{format_exc()}"
        ) from error


def _as_case(name: str, answer: Any) -> Case:
    """Return the case that a function of the user gave, or say what is wrong with it."""
    if isinstance(answer, Case):
        answer = (answer.stages, answer.args, answer.target, answer.loss)
    if not isinstance(answer, tuple) or len(answer) != 4:
        raise ModelError(
            f"{name} must return stages, args, target and loss (got {_describe(answer)})"
        )
    stages, args, _, loss = answer
    if not isinstance(stages, Sequence) or not all(isinstance(s, nn.Module) for s in stages):
        raise ModelError(f"{name}: stages must be a list of modules (got {_describe(stages)})")
    if not isinstance(args, tuple):
        raise ModelError(
            f"{name}: args must be the tuple of the first stage's inputs (got {_describe(args)})"
        )
    if not callable(loss):
        raise ModelError(
            f"{name}: loss must be a function of output and target (got {_describe(loss)})"
        )
    return Case(*answer)


def _describe(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, tuple | list):
        return f"{kind} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return kind
