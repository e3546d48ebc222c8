"""Runs a model on the meta device where its code looks at values: of masks, positions, lengths.

Units run without values, and return zeros. What is between them runs with the values of the
inputs, and with zeros as parameters; so does a unit that looks at values itself.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.splitting.by_layers.units import Units
from penstock.torch_private import tree_leaves, tree_map_only

__all__ = ["units_without_values"]


_Meta = dict[int, torch.Tensor]


@contextmanager
def units_without_values(model: nn.Module, units: Units, inputs: Any) -> Iterator[None]:
    """Let a model on the meta device run on these inputs, which have values."""
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    with ExitStack() as stack:
        # Those of units too, since the model may use them outside of the calls of units.
        meta = stack.enter_context(_zeros_instead(model, device))
        for module in dict.fromkeys(unit.module for unit in units.units):
            stack.enter_context(_own_forward(module, partial(_run, module, device, meta)))
        yield


@contextmanager
def _zeros_instead(model: nn.Module, device: torch.device) -> Iterator[_Meta]:
    """Give a model zeros for what it has on the meta device; yield that by what replaces it."""
    made: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            made[id(tensor)] = _zeros(device, tensor)
    originals = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.is_meta}
    meta = {id(zeros): originals[key] for key, zeros in made.items()}
    with _replaced(model, made):
        yield meta


@contextmanager
def _replaced(module: nn.Module, others: _Meta) -> Iterator[None]:
    """Replace parameters and buffers by others, which are known by the identity of the first."""
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for inner in module.modules():
        tables: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
        for table in tables:
            for name, tensor in table.items():
                if id(tensor) in others:
                    replaced.append((table, name, tensor))
    for table, name, tensor in replaced:
        table[name] = others[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor


def _zeros(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros like a tensor; those of a parameter share one number, as nobody writes it."""
    if isinstance(tensor, nn.Parameter):
        zero = torch.zeros((), dtype=tensor.dtype, device=device)
        return nn.Parameter(zero.expand(tensor.shape), requires_grad=tensor.requires_grad)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


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


def _run(
    module: nn.Module,
    device: torch.device,
    meta: _Meta,
    forward: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
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
        with _replaced(module, meta):
            output = forward(*hidden[0], **hidden[1])
    except (NotImplementedError, RuntimeError):
        return forward(*args, **kwargs)
    return tree_map_only(torch.Tensor, show, output)
