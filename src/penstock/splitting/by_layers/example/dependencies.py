"""Runs a model once on an example, and sees which calls of its units depend on which values.

Between units the model computes with plain tensors: masks, positions, sums. Every such tensor is
followed back to the values that it came from: inputs of the model, parameters and buffers that are
used outside of the calls of units, and what units returned.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.errors import ModelError
from penstock.modules.compiled import run_eagerly
from penstock.modules.untouched import untouched
from penstock.splitting.by_layers.example.changed_attributes import changed_names, look_at
from penstock.splitting.by_layers.example.side_outputs import SideOutputs, tensors_in, written_by
from penstock.splitting.by_layers.example.unit_calls import UnitCalls
from penstock.splitting.by_layers.hooks.hooks import Given
from penstock.splitting.by_layers.hooks.inner_values import (
    Observed,
    observe,
    seen_by_hooks,
    version_of,
)
from penstock.splitting.by_layers.inputs import parameter_names
from penstock.splitting.by_layers.notes import (
    Value,
    describe,
    describe_inputs,
    describe_side,
    side_path,
)
from penstock.splitting.by_layers.units import Units
from penstock.splitting.caches import find_configs, refuse_cache, without_cache
from penstock.torch_private import TorchDispatchMode, tree_leaves, tree_map_only

__all__ = ["Call", "Dependencies", "find_needs"]

Sources = frozenset[Value]
_NOTHING: Sources = frozenset()
# Functions after which Python code may do one thing or another, as the values say; further ones
# are known by what torch says of the operations that they are made of.
_DECIDING = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
_DECIDING_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a unit: its path and number, and the values that its arguments came from."""

    path: str
    number: int
    uses: Sources


@dataclass(slots=True)
class Dependencies:
    """What one run showed: the calls in order, and the values that other things came from.

    A parameter or buffer that is used outside of the calls of units is a value of its own name;
    `written` has those of the containers that were written to, with what was written. `bonds` has
    units of which the second uses what is inside of the first, `outlines` the tree of the inputs
    and the number of leaves of the output. `sides` has the calls inside of units that hooks look
    at, as path of their values and number, with the call of the unit. `rewritten` has the values
    that are written to in place between units. `changed` has the plain attributes of units that
    were changed, by unit, `constants` the whole names of the others.
    """

    inputs: Sources = _NOTHING
    calls: list[Call] = field(default_factory=list)
    output: Sources = _NOTHING
    decisions: Sources = _NOTHING
    written: dict[str, Sources] = field(default_factory=dict)
    bonds: frozenset[tuple[str, str]] = frozenset()
    outlines: tuple[str, int] = ("", 0)
    sides: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    rewritten: Sources = _NOTHING
    constants: frozenset[str] = frozenset()
    changed: dict[str, tuple[str, ...]] = field(default_factory=dict)


def find_needs(
    model: nn.Module, units: Units, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Dependencies:
    """Run the model once without a graph; its buffers and the random numbers stay as they were."""
    tracker = _Tracker(dict(_loose_tensors(model, units)))
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    inputs = (args, dict(kwargs))
    configs = find_configs(model)
    refuse_cache(configs, kwargs)
    if is_meta:
        inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), inputs)
    tracker.learn_inputs(parameter_names(model), *inputs)
    with ExitStack() as stack:
        stack.enter_context(untouched([model]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_unwarned())
        stack.enter_context(without_cache(configs))
        stack.enter_context(run_eagerly(model))
        watch = UnitCalls(tracker)
        stack.callback(watch.stop)
        for unit in units.units:
            watch.add(unit.path, unit.module)
        tracker.attend = watch.attend
        before = {unit.path: look_at(unit.module) for unit in units.units}
        with tracker:
            output = _call_on_meta(model, *inputs) if is_meta else model(*inputs[0], **inputs[1])
        tracker.finish(output)
        _note_attributes(tracker.needs, units, before)
    return tracker.needs


def _note_attributes(
    needs: Dependencies, units: Units, before: Mapping[str, dict[str, Any]]
) -> None:
    """See which plain attributes of units the run has changed, and which tensors it has not."""
    for unit in units.units:
        after = look_at(unit.module)
        changed = changed_names(before[unit.path], after)
        if changed:
            needs.changed[unit.path] = changed
        same = (f"{unit.path}.{name}" for name in after if name not in changed)
        needs.constants |= frozenset(same)


def _call_on_meta(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return model(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise ModelError(
            "the model cannot be run with the example on the meta device, since what it does "
            f"depends on values ({error}); leave out the example, or leave out of it what the "
            "values are asked of"
        ) from error


def _loose_tensors(model: nn.Module, units: Units) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of containers and of units, by name; layers last, for what others share."""
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


class _Decisions(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Notices operations whose result Python sees, or whose values say how large it is."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self.is_one = False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do what is asked, and notice what it is."""
        if _DECIDING_TAGS.intersection(func.tags):
            self.is_one |= func is not torch.ops.aten.index.Tensor or _has_mask(args[1])
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


class _Tracker(TorchFunctionMode):
    """Follows tensors through everything that is computed outside of units."""

    def __init__(self, loose: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.is_running = True
        self.attend: Callable[[str], None] = lambda _path: None
        self.needs = Dependencies()
        self._sources: MutableMapping[torch.Tensor, Sources] = WeakTensorKeyDictionary()
        # The tensors that are values themselves.
        self._values: MutableMapping[torch.Tensor, Value] = WeakTensorKeyDictionary()
        self._counts: Counter[str] = Counter()
        self._inside: list[str] = []
        self._observed: list[Observed] = []
        self._decisions = _Decisions()
        self._leaks = SideOutputs()
        self._inputs_tree = ""
        self._names: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()
        for name, tensor in loose.items():
            if tensor not in self._names:
                self._names[tensor] = name
                self._sources[tensor] = frozenset([Value(name, 0, "")])

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do what is asked, and note what the result came from."""
        if self._inside:
            result = func(*args, **(kwargs or {}))
            self._leaks.note_inside(self._inside[0], func, (*args, kwargs), result)
            return result
        given = [(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs))]
        with self._decisions:
            result = func(*args, **(kwargs or {}))
        self.needs.rewritten |= self._written_values(given)
        self._leaks.note_outside((args, kwargs), result)
        self._note(func, args, result, self.sources((args, kwargs)))
        return result

    def _note(self, func: Any, args: tuple[Any, ...], result: Any, found: Sources) -> None:
        if func in _DECIDING or self._decisions.is_one:
            self.needs.decisions |= found
            self._leaks.refuse(args, "the model decides by")
        self._decisions.is_one = False
        for tensor in written_by(func, args):
            if tensor in self._names:
                name = self._names[tensor]
                self.needs.written[name] = self.needs.written.get(name, _NOTHING) | found
            self._mark_written(tensor, found)
        for tensor in tensors_in(result):
            self._sources[tensor] = found | self.sources(tensor)

    def sources(self, tree: Any) -> Sources:
        """The values that anything in a tree came from."""
        found = _NOTHING
        for tensor in tensors_in(tree):
            found |= self._sources.get(tensor, _NOTHING)
            if tensor._base is not None:
                found |= self._sources.get(tensor._base, _NOTHING)
        return found

    def _mark_written(self, tensor: torch.Tensor, sources: Sources) -> None:
        """What was written to a view is in what it is a view of, and so in its other views."""
        for target in (tensor, tensor._base):
            if target is not None:
                self._sources[target] = self._sources.get(target, _NOTHING) | sources

    def _written_values(self, given: list[tuple[torch.Tensor, int]]) -> Sources:
        """The values of which these tensors are, or are views, that have been written to."""
        written = {
            tensor.untyped_storage()._cdata
            for tensor, version in given
            if version_of(tensor) != version
        }
        if not written:
            return _NOTHING
        return frozenset(
            value for t, value in self._values.items() if t.untyped_storage()._cdata in written
        )

    def _learn(self, tensors: list[tuple[Value, torch.Tensor]]) -> None:
        """Make every tensor a value of its own."""
        for value, tensor in tensors:
            self._sources[tensor] = frozenset([value])
            self._values[tensor] = value

    def learn_inputs(self, names: list[str], args: Any, kwargs: Any) -> None:
        """Make the inputs of the model values."""
        entry, tensors = describe_inputs(names, args, kwargs)
        self._inputs_tree = entry.tree
        self.needs.inputs = frozenset(value for value, _ in tensors)
        self._learn(tensors)

    def enter(self, path: str, given: Given) -> None:
        """A unit is called: note what its arguments came from, and do not look inside."""
        if not self._inside:
            self.attend(path)
            self._leaks.refuse(given, f"{path!r} gets")
            self._leaks.enter(given)
            self.needs.calls.append(Call(path, self._counts[path], self.sources(given)))
        self._inside.append(path)

    def observe(self, path: str, given: Given, output: Any) -> None:
        """A module has made something inside of a unit, and hooks are about to see it."""
        if self._inside and f"{path}.".startswith(f"{self._inside[0]}."):
            self._observed.append(observe(path, given, output))

    def leave(self, path: str, output: Any) -> None:
        """A unit returns."""
        self._inside.pop()
        if not self._inside:
            observed, self._observed = seen_by_hooks(path, self._observed, output), []
            self._leaks.forgive(output)
            self._learn(describe(path, self._counts[path], output)[1])
            for one in observed:
                self._learn_side((path, self._counts[path]), one)
            self._counts[path] += 1

    def _learn_side(self, unit: tuple[str, int], one: Observed) -> None:
        """Make what hooks saw inside of a unit values, unless it is known by another name."""
        place = side_path(one.path), self._counts[side_path(one.path)]
        self._counts[place[0]] += 1
        self.needs.sides[place] = unit
        if one.is_written:
            return
        self._leaks.forgive(one.tree)
        _, tensors = describe_side(unit, one.path, place[1], one.tree, {})
        self._learn([(value, t) for value, t in tensors if not self.sources(t)])

    def finish(self, output: Any) -> None:
        """The model has returned."""
        self._leaks.refuse(output, "the model returns")
        self.needs.output = self.sources(output)
        self.needs.bonds = frozenset(self._leaks.bonds)
        self.needs.outlines = self._inputs_tree, len(tree_leaves(output))


@contextmanager
def _unwarned() -> Iterator[None]:
    """Checkpoints warn that there will be no gradients, which is as it should be here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        yield
