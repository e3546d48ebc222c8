"""Compiled stages that cannot run among several ranks on devices."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import nn

from penstock.errors import ArgumentError
from penstock.modules.compiled import is_compiled
from penstock.step.stage import Stage

__all__ = ["find_compiled_functions", "refuse_compiled_graphs"]

# The attribute of a function that `torch.compile` returned: what it was given.
_ORIGINAL = "_torchdynamo_orig_callable"


def refuse_compiled_graphs(stages: Mapping[int, Stage], device: torch.device) -> None:
    """Refuse stages whose outputs lie where the next microbatch is written, on a device.

    They may still be on their way. A split backward has compiled its stages again without graphs.
    """
    if device.type == "cpu":
        return
    for index, stage in stages.items():
        compiled = [module for module in stage.module.modules() if is_compiled(module)]
        compiled += find_compiled_functions(stage.module)
        if not compiled:
            continue
        # Loading the compiler takes seconds; with compiled modules it is there already.
        from penstock.deferred.compiled import captures_graphs

        if any(captures_graphs(one) for one in compiled):
            raise ArgumentError(
                f"stage {index} must not be compiled with mode='reduce-overhead', "
                "backend='cudagraphs' or torch._inductor.config.triton.cudagraphs, because such "
                "CUDA graphs overwrite outputs that are still being sent; compile it without "
                "them, and give options=ps.RunOptions(cuda_graphs=True) for graphs"
            )


def find_compiled_functions(module: nn.Module) -> list[Any]:
    """Return compiled functions that a module has, or that its forwards name."""
    return [found for inner in module.modules() for found in _named(inner) if _is_function(found)]


def _named(module: nn.Module) -> Iterator[Any]:
    """Yield what the forward of a module can reach by a single name."""
    yield from vars(module).values()
    # A module of TorchScript has none in its class.
    forward: Any = getattr(type(module), "forward", None)
    code = getattr(forward, "__code__", None)
    if code is not None:
        for name in code.co_names:
            yield forward.__globals__.get(name)
            yield getattr(type(module), name, None)
        for cell in forward.__closure__ or ():
            with suppress(ValueError):
                yield cell.cell_contents
    yield forward


def _is_function(found: Any) -> bool:
    return isinstance(found, FunctionType) and hasattr(found, _ORIGINAL)
