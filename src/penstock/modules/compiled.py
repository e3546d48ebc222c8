"""Compiled modules: how to know one, what is inside of it, and how to run it uncompiled."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

__all__ = [
    "COMPILED_CALL",
    "is_compiled",
    "is_compiler_wrapper",
    "leave_uncompiled",
    "run_eagerly",
    "unwrap_compiled",
]

# The attribute of a module in which `module.compile()` keeps the compiled code.
COMPILED_CALL = "_compiled_call_impl"
# The child of what `torch.compile(module)` returns: the module itself.
_WRAPPED = "_orig_mod"


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled in place, or is what `torch.compile` returned."""
    return module._compiled_call_impl is not None or is_compiler_wrapper(module)


def is_compiler_wrapper(module: nn.Module) -> bool:
    """Return whether a module is what `torch.compile` has put around another one."""
    return _WRAPPED in module._modules


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was given, or the module itself."""
    return module._modules.get(_WRAPPED) or module


def run_eagerly(*modules: nn.Module) -> AbstractContextManager[object]:
    """Run nothing as compiled code; the compiler is loaded only if these modules need it.

    Functions may be compiled too, which has loaded the compiler.
    """
    inner = (part for module in modules for part in module.modules())
    if "torch._dynamo" in sys.modules or any(map(is_compiled, inner)):
        stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


def leave_uncompiled(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook for a module that is called, but not compiled together with the module."""
    if not is_compiled(module):
        return hook
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]  # untyped upstream
    return disabled
