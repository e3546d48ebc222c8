"""Follows tensors through one run of a model, back to the values that they depend on.

Between units the model computes with plain tensors: masks, positions, sums. Each is followed back
to inputs of the model, to parameters and buffers that are used outside of the calls of units, and
to what units returned.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.splitting.by_layers.example.side_outputs import SideOutputs, tensors_in, written_by
from penstock.splitting.by_layers.hooks.hooks import Given
from penstock.splitting.by_layers.hooks.inner_values import (
    Observed,
    observe,
    seen_by_hooks,
    version_of,
)
from penstock.splitting.by_layers.records.call_records import (
    Value,
    describe,
    describe_hook_call,
    describe_inputs,
    hook_path,
)
from penstock.splitting.by_layers.records.shared_containers import (
    Contents,
    contents_of,
    look_into,
    returned_by,
)
from penstock.torch_private import (
    TorchDispatchMode,
    get_functorch_unwrapped,
    is_functorch_wrapped_tensor,
    tree_leaves,
)

__all__ = ["Call", "Dependencies", "ValueTracker"]

Sources = frozenset[Value]
_NOTHING: Sources = frozenset()
# Functions that give values to Python code, which may branch on them. Others are found by the
# tags of the operations that they call.
_DECIDING = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
_DECIDING_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a unit: its path and number, and the values that its arguments depend on."""

    path: str
    number: int
    uses: Sources


@dataclass(slots=True)
class Dependencies:
    """The calls of one run in order, and the values that they and other things depend on.

    A parameter or buffer that is used outside of the calls of units is a value of its own name.

    - `counts`: what is counted into a known length, as tokens per expert. Every stage counts it,
      but nothing else depends on the values.
    - `written`: buffers of containers that were written to, with the values written.
    - `merged`: what was written to a tensor, what that was made of before, and the number of calls
      until then.
    - `inner_uses`: pairs of units of which the second uses a tensor from inside of the first.
    - `example_form`: the tree of the inputs, and the number of leaves of the output.
    - `hook_calls`: calls inside of units that have hooks, as path and number, with the unit.
    - `rewritten`: values that are written to in place between units.
    - `constants`: whole names of plain attributes of units that stayed the same.
    - `changed`: plain attributes that changed, by unit.
    """

    inputs: Sources = _NOTHING
    calls: list[Call] = field(default_factory=list)
    output: Sources = _NOTHING
    decisions: Sources = _NOTHING
    counts: Sources = _NOTHING
    written: dict[str, Sources] = field(default_factory=dict)
    merged: set[tuple[Sources, Sources, int]] = field(default_factory=set)
    inner_uses: frozenset[tuple[str, str]] = frozenset()
    example_form: tuple[str, int] = ("", 0)
    hook_calls: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    rewritten: Sources = _NOTHING
    constants: frozenset[str] = frozenset()
    changed: dict[str, tuple[str, ...]] = field(default_factory=dict)


class _Decisions(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Detects operations that give values to Python code, or sizes that depend on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self.is_found = self.is_count = False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and check what it is."""
        is_bincount = func is torch.ops.aten.bincount.default
        length = _length_of_counts(*args, **(kwargs or {})) if is_bincount else 0
        if length:
            self.is_count = True
            if args[0].is_meta:  # where torch cannot count
                return args[0].new_empty(length, dtype=torch.long)
        elif _DECIDING_TAGS.intersection(func.tags):
            self.is_found |= func is not torch.ops.aten.index.Tensor or _has_mask(args[1])
        return func(*args, **(kwargs or {}))


def _length_of_counts(_given: Any, weights: Any = None, minlength: int = 0) -> int:
    """Return the length that counts have whatever is counted, or zero if values decide it."""
    return minlength if weights is None else 0


def _unwrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor and, inside of `torch.vmap` and its like, the tensors that it is made of."""
    yield tensor
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_functorch_unwrapped(tensor)
        yield tensor


def _memory(tensor: torch.Tensor) -> int:
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _has_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


class ValueTracker(TorchFunctionMode):
    """Follows tensors through everything that is computed outside of units.

    `dependencies` is complete when `finish` was called.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.is_running = True
        self.prepare_hooks: Callable[[str], None] = lambda _path: None
        self.dependencies = Dependencies()
        self._sources: MutableMapping[torch.Tensor, Sources] = WeakTensorKeyDictionary()
        # Tensors that are values themselves, some by several names, with their versions.
        self._values: MutableMapping[torch.Tensor, tuple[Sources, int]] = WeakTensorKeyDictionary()
        self._counts: Counter[str] = Counter()
        self._units: list[str] = []
        self._given: Given = ((), {})
        self._contents_before: Contents = {}
        self._observed: list[Observed] = []
        self._decisions = _Decisions()
        self._side_outputs = SideOutputs()
        self._inputs_tree = ""
        self._names: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()
        for name, tensor in named.items():
            if tensor not in self._names:
                self._names[tensor] = name
                self._sources[tensor] = frozenset([Value(name, 0, "")])

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function, and record what its result depends on."""
        if self._units:
            result = func(*args, **(kwargs or {}))
            self._side_outputs.record_inside(self._units[0], func, (*args, kwargs), result)
            return result
        given = [(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs))]
        with self._decisions:
            result = func(*args, **(kwargs or {}))
        self.dependencies.rewritten |= self._written_values(given)
        self._side_outputs.record_outside((args, kwargs), result)
        self._record(func, args, result, self.sources((args, kwargs)))
        return result

    def _record(self, func: Any, args: tuple[Any, ...], result: Any, found: Sources) -> None:
        if func in _DECIDING or self._decisions.is_found:
            self.dependencies.decisions |= found
            self._side_outputs.refuse(args, "the model decides by")
        if self._decisions.is_count:
            self.dependencies.counts |= found
            self._side_outputs.refuse(args, "the model counts")
        self._decisions.is_found = self._decisions.is_count = False
        for tensor in written_by(func, args):
            before = self.sources(tensor)
            if tensor in self._names:
                name, written = self._names[tensor], self.dependencies.written
                written[name] = written.get(name, _NOTHING) | found
            elif found - before:
                calls = len(self.dependencies.calls)
                self.dependencies.merged.add((found - before, before, calls))
            self._mark_written(tensor, found)
        for tensor in tensors_in(result):
            for inner in _unwrapped(tensor):
                self._sources[inner] = found | self.sources(inner)

    def sources(self, tree: Any) -> Sources:
        """Return the values that anything in a tree depends on."""
        found = _NOTHING
        for tensor in tensors_in(tree):
            for inner in _unwrapped(tensor):
                found |= self._sources.get(inner, _NOTHING)
                if inner._base is not None:
                    found |= self._sources.get(inner._base, _NOTHING)
        return found

    def _mark_written(self, tensor: torch.Tensor, sources: Sources) -> None:
        """Add sources to a tensor that was written to, and to the tensor that it is a view of."""
        for target in (tensor, tensor._base):
            if target is not None:
                self._sources[target] = self._sources.get(target, _NOTHING) | sources

    def _written_values(self, given: list[tuple[torch.Tensor, int]]) -> Sources:
        """Return the values that share memory with those of these tensors that were written to."""
        written = {_memory(tensor) for tensor, version in given if version_of(tensor) != version}
        if not written:
            return _NOTHING
        found = (v for t, (v, _) in self._values.items() if _memory(t) in written)
        return frozenset().union(*found)

    def _add_values(self, tensors: list[tuple[Value, torch.Tensor]]) -> None:
        """Make every tensor a value.

        One that is a value already and unchanged, since a unit returned it twice or returned what
        it got, is known by all its names, because the model may use it by any of them.
        """
        for value, tensor in tensors:
            names, version = self._values.get(tensor, (_NOTHING, -1))
            now = version_of(tensor)
            self._sources[tensor] = frozenset([value]) | (names if version == now else _NOTHING)
            self._values[tensor] = self._sources[tensor], now

    def add_inputs(self, names: list[str], args: Any, kwargs: Any) -> None:
        """Make the inputs of the model values."""
        record, tensors = describe_inputs(names, args, kwargs)
        self._inputs_tree = record.tree
        self.dependencies.inputs = frozenset(value for value, _ in tensors)
        self._add_values(tensors)

    def enter(self, path: str, given: Given) -> None:
        """Begin a call of a unit, and record what its arguments depend on."""
        if not self._units:
            self._given, self._contents_before = given, contents_of(given)
            seen = look_into(given)
            self.prepare_hooks(path)
            self._side_outputs.refuse(seen, f"{path!r} gets")
            self._side_outputs.enter(seen)
            self.dependencies.calls.append(Call(path, self._counts[path], self.sources(seen)))
        self._units.append(path)

    def observe(self, path: str, given: Given, output: Any) -> None:
        """Record the output of a module inside of a unit, before its hooks get it."""
        if self._units and f"{path}.".startswith(f"{self._units[0]}."):
            self._observed.append(observe(path, given, output))

    def leave(self, path: str, output: Any) -> None:
        """End a call of a unit."""
        self._units.pop()
        if not self._units:
            returned = returned_by(output, self._contents_before, self._given)
            self._given, self._contents_before = ((), {}), {}
            observed, self._observed = seen_by_hooks(path, self._observed, output), []
            self._side_outputs.allow((output, returned.entries))
            self._add_values(describe(path, self._counts[path], returned)[1])
            for one in observed:
                self._add_hook_call((path, self._counts[path]), one)
            self._counts[path] += 1

    def _add_hook_call(self, unit: tuple[str, int], one: Observed) -> None:
        """Make what hooks got inside of a unit values, unless they are values already."""
        place = hook_path(one.path), self._counts[hook_path(one.path)]
        self._counts[place[0]] += 1
        self.dependencies.hook_calls[place] = unit
        if one.is_written:
            return
        self._side_outputs.allow(one.tree)
        _, tensors = describe_hook_call(unit, one.path, place[1], one.tree, {})
        self._add_values([(value, t) for value, t in tensors if not self.sources(t)])

    def finish(self, output: Any) -> None:
        """Complete the dependencies, when the model has returned."""
        self._side_outputs.refuse(output, "the model returns")
        self.dependencies.output = self.sources(output)
        self.dependencies.inner_uses = frozenset(self._side_outputs.inner_uses)
        self.dependencies.example_form = self._inputs_tree, len(tree_leaves(output))
