"""Runs a model once on an example, and finds which calls of its units depend on which values."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.modules.compiled import run_eagerly
from penstock.modules.untouched import untouched
from penstock.splitting.by_layers.call_records import (
    parameter_names,
)
from penstock.splitting.by_layers.example.changed_attributes import changed_names, read_attributes
from penstock.splitting.by_layers.example.unit_calls import UnitCalls
from penstock.splitting.by_layers.example.value_tracker import Dependencies, ValueTracker
from penstock.splitting.by_layers.units import Units
from penstock.splitting.caches import find_configs, refuse_cache, without_cache
from penstock.torch_private import tree_map_only

__all__ = ["find_dependencies"]


def find_dependencies(
    model: nn.Module, units: Units, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Dependencies:
    """Run the model once without a graph and without a trace, and return what it depends on."""
    tracker = ValueTracker(dict(_named_tensors(model, units)))
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    inputs = (args, dict(kwargs))
    configs = find_configs(model)
    refuse_cache(configs, kwargs)
    if is_meta:
        inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), inputs)
    tracker.add_inputs(parameter_names(model), *inputs)
    with ExitStack() as stack:
        stack.enter_context(untouched([model]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_without_gradient_warnings())
        stack.enter_context(without_cache(configs))
        stack.enter_context(run_eagerly(model))
        calls = UnitCalls(tracker)
        stack.callback(calls.stop)
        for unit in units.units:
            calls.add(unit.path, unit.module)
        tracker.prepare_hooks = calls.prepare_hooks
        before = {unit.path: read_attributes(unit.module) for unit in units.units}
        stack.enter_context(tracker)
        output = _call_on_meta(model, *inputs) if is_meta else model(*inputs[0], **inputs[1])
    tracker.finish(output)
    _record_attributes(tracker.dependencies, units, before)
    return tracker.dependencies


def _record_attributes(
    dependencies: Dependencies, units: Units, before: Mapping[str, dict[str, Any]]
) -> None:
    """Record which plain attributes of units the run has changed, and which it has not."""
    for unit in units.units:
        after = read_attributes(unit.module)
        changed = changed_names(before[unit.path], after)
        if changed:
            dependencies.changed[unit.path] = changed
        same = (f"{unit.path}.{name}" for name in after if name not in changed)
        dependencies.constants |= frozenset(same)


def _call_on_meta(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return model(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise ModelError(
            "the model cannot be run with the example on the meta device, because it depends on "
            f"values ({error}); leave out the example, or the inputs whose values it uses"
        ) from error


def _named_tensors(model: nn.Module, units: Units) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of containers and units by name; layers last, as others may share them."""
    for path in sorted(units.containers):
        for name, tensor in _own_tensors(model.get_submodule(path)):
            yield f"{path}.{name}".lstrip("."), tensor
    for unit in sorted(units.units, key=lambda unit: unit.layer is not None):
        for inner, module in unit.module.named_modules():
            for name, tensor in _own_tensors(module):
                yield ".".join(part for part in (unit.path, inner, name) if part), tensor


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


@contextmanager
def _without_gradient_warnings() -> Iterator[None]:
    """Suppress the warning of checkpoints that there will be no gradients, as intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        yield
