"""Compiled modules: run as they are where every operation is watched, and hooks left alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

__all__ = ["is_compiled", "leave_uncompiled", "run_eagerly"]


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled in place, or is what compilation has put around one."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def run_eagerly(module: nn.Module) -> AbstractContextManager[object]:
    """Let nothing in a module run as compiled code; the compiler is loaded only if needed."""
    if any(is_compiled(inner) for inner in module.modules()):
        stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


def leave_uncompiled(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for a module, which is called and not compiled where the module is."""
    if not is_compiled(module):
        return hook
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]  # untyped upstream
    return disabled
