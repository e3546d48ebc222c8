"""Runs a model once on an example, and finds which calls of its units depend on which values."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.modules.compiled import run_eagerly
from penstock.modules.untouched import untouched
from penstock.splitting.by_layers.example.changed_attributes import changed_names, read_attributes
from penstock.splitting.by_layers.example.unit_calls import UnitCalls
from penstock.splitting.by_layers.example.value_tracker import Dependencies, ValueTracker
from penstock.splitting.by_layers.example.without_values import units_without_values
from penstock.splitting.by_layers.records.call_records import INPUTS, parameter_names
from penstock.splitting.by_layers.units import Units
from penstock.splitting.caches import find_configs, refuse_cache, without_cache
from penstock.torch_private import tree_map_only

__all__ = ["find_dependencies"]


def find_dependencies(
    model: nn.Module, units: Units, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Dependencies:
    """Run the model once without a graph and without a trace, and return what it depends on."""
    refuse_cache(find_configs(model), kwargs)
    inputs = (args, dict(kwargs))
    if not any(parameter.is_meta for parameter in model.parameters()):
        return _observe(model, units, inputs, nullcontext())
    try:
        hidden = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), inputs)
        return _observe(model, units, hidden, nullcontext())
    except (NotImplementedError, RuntimeError):
        return _observe_on_meta(model, units, inputs)


def _observe_on_meta(
    model: nn.Module, units: Units, inputs: tuple[tuple[Any, ...], dict[str, Any]]
) -> Dependencies:
    """Run a model on the meta device whose code looks at values."""
    try:
        found = _observe(model, units, inputs, units_without_values(model, units, inputs))
    except (NotImplementedError, RuntimeError) as error:
        raise _no_values(str(error)) from error
    if unknown := sorted(value.path for value in found.decisions if value.path != INPUTS):
        raise _no_values(f"of what {unknown[0]!r} returns or holds")
    return found


def _no_values(why: str) -> ModelError:
    return ModelError(
        "the model cannot be run with the example on the meta device, because it depends on "
        f"values ({why}); leave out the example, or the inputs whose values it uses"
    )


def _observe(
    model: nn.Module,
    units: Units,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    prepared: AbstractContextManager[None],
) -> Dependencies:
    with ExitStack() as stack:
        for context in (
            untouched([model]),
            prepared,
            torch.no_grad(),
            _without_gradient_warnings(),
            without_cache(find_configs(model)),
            run_eagerly(model),
        ):
            stack.enter_context(context)
        tracker = ValueTracker(dict(_named_tensors(model, units)))
        tracker.add_inputs(parameter_names(model), *inputs)
        calls = UnitCalls(tracker)
        stack.callback(calls.stop)
        for unit in units.units:
            calls.add(unit.path, unit.module)
        tracker.prepare_hooks = calls.prepare_hooks
        before = {unit.path: read_attributes(unit.module) for unit in units.units}
        stack.enter_context(tracker)
        tracker.finish(model(*inputs[0], **inputs[1]))
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
