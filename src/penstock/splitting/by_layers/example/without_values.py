"""Runs a model on the meta device where its code looks at values: of masks, positions, lengths.

Units run without values, and return zeros. What is between them runs with the values of the
inputs. A unit that looks at values itself gets zeros as parameters, only while it runs.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.splitting.by_layers.units import Units
from penstock.torch_private import tree_leaves, tree_map_only

__all__ = ["units_without_values"]


@contextmanager
def units_without_values(model: nn.Module, units: Units, inputs: Any) -> Iterator[None]:
    """Let a model on the meta device run on these inputs, which have values."""
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    inside = {part for unit in units.units for part in unit.module.modules()}
    beside = [module for module in model.modules() if module not in inside]
    with ExitStack() as stack:
        stack.enter_context(_memory(beside, device))
        for module in dict.fromkeys(unit.module for unit in units.units):
            stack.enter_context(_own_forward(module, partial(_run, module, device)))
        yield


@contextmanager
def _memory(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Give modules zeros for what they have on the meta device, meanwhile."""
    made: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in modules:
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    replaced.append((table, name, tensor))
    for table, name, tensor in replaced:
        if id(tensor) not in made:
            made[id(tensor)] = _zeros(device, tensor)
        table[name] = made[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor


def _zeros(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(zeros, requires_grad=tensor.requires_grad)
    return zeros


@contextmanager
def _own_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Run this instead of a module's forward meanwhile, with the module's own as an argument."""
    own, table = module.forward, vars(module)
    before = {name: table[name] for name in ("forward",) if name in table}
    table["forward"] = partial(forward, own)
    try:
        yield
    finally:
        del table["forward"]
        table.update(before)


def _run(module: nn.Module, device: torch.device, forward: Any, *args: Any, **kwargs: Any) -> Any:
    given: dict[int, torch.Tensor] = {}

    def hide(tensor: torch.Tensor) -> torch.Tensor:
        hidden = tensor.to("meta")
        given[id(hidden)] = tensor
        return hidden

    def show(tensor: torch.Tensor) -> torch.Tensor:
        # What a unit returns as it got it is still known by its earlier name.
        known = given.get(id(tensor))
        return _zeros(device, tensor) if known is None else known

    hidden = tree_map_only(torch.Tensor, hide, (args, kwargs))
    try:
        output = forward(*hidden[0], **hidden[1])
    except (NotImplementedError, RuntimeError):
        with _memory(module.modules(), device):
            return forward(*args, **kwargs)
    return tree_map_only(torch.Tensor, show, output)
