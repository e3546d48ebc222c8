"""Conversions of modules in a forward that is traced, such as `self.router.to(torch.float32)`.

A trace cannot change the type of a parameter. A conversion that changes nothing is left out, and
another one is refused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_tracing.capture.value_functions import outside_of_trace

__all__ = ["leave_out_conversions"]


def leave_out_conversions(model: nn.Module) -> None:
    """Let the modules of a model ignore conversions to what they are.

    This is an attribute of each module; the caller removes it.
    """
    for path, module in model.named_modules():
        module.__dict__["_apply"] = partial(_refuse_change, module, path)


def _refuse_change(
    module: nn.Module,
    path: str,
    convert: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,  # torch's form
) -> Any:
    for name, tensor in [
        *module.named_parameters(recurse=recurse),
        *module.named_buffers(recurse=recurse),
    ]:
        with outside_of_trace():
            before = torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
            after = convert(before)
        if after is not before:
            whole = ".".join(filter(None, (path, name)))
            raise ModelError(
                f"a model that is traced must not convert its modules (it converts {whole!r} from "
                f"{before.dtype} on {before.device} to {after.dtype} on {after.device}); run it "
                "once before it is split, convert it yourself, or split it by layers"
            )
    return module
