"""Values that are known while a model is traced, so that its path may depend on them.

A traced tensor has a shape but no values. Known all the same is what a model makes of plain
numbers, whether a random number is below one that its range cannot reach, and what is computed
from known values alone. Integer inputs have the values of the example; where the model reads
those, the graph gets a condition, which each run checks:

    lengths = grid[:, 1] * grid[:, 2]       known from the example
    lengths.tolist()                        [16, 16], on condition that `lengths` is that
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.splitting.by_tracing.capture.conditions import require_values
from penstock.splitting.by_tracing.capture.random_ranges import (
    Range,
    decide_comparison,
    find_range,
    is_comparison,
)
from penstock.splitting.by_tracing.capture.user_code import calling_line
from penstock.splitting.by_tracing.capture.value_functions import (
    COPIES,
    INDEXING,
    MAKERS,
    READS,
    REPEATS,
    SHAPED_BY_VALUES,
    SIZED,
    compute,
    is_followed,
    is_plain,
    outside_of_trace,
)
from penstock.torch_private import peek_interpreter_stack, pytree

__all__ = ["KnownInput", "KnownValues", "RandomPathError", "Reads"]

# Tensors with more values than this are not followed.
_MOST = 1 << 20
# Writes to `data`, or to what it gives, are not seen at the tensor.
_DATA: Any = torch.Tensor.data
_LEAKS = frozenset((_DATA.__get__, _DATA.__set__))


class RandomPathError(Exception):
    """The path of a model depends on a random number, which is compared at this place."""

    def __init__(self, number: float, place: str) -> None:
        super().__init__(number, place)
        self.number, self.place = number, place


@dataclass(frozen=True, slots=True)
class KnownInput:
    """An input of a trace, its name, and its values in the example."""

    traced: torch.Tensor
    name: str
    value: torch.Tensor


@dataclass(slots=True)
class Reads:
    """Whether reads of what depends on inputs are answered, and whether one was not."""

    are_answered: bool = False
    has_missed: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    """The values of a tensor, as of a version of it, if these inputs have the example's."""

    value: torch.Tensor
    version: int
    inputs: frozenset[str]


class _Call(NamedTuple):
    """The arguments of a function as real tensors, and the inputs that they depend on."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: frozenset[str]


class _Drawn(NamedTuple):
    """What a tensor of random numbers was drawn from, as of a version of it."""

    range: Range
    version: int


class KnownValues(TorchFunctionMode):
    """Follows the values that are known in a trace, and answers reads of them."""

    def __init__(self, inputs: Iterable[KnownInput], reads: Reads) -> None:
        super().__init__()
        self._reads = reads
        self._known: Any = WeakTensorKeyDictionary()
        self._drawn: Any = WeakTensorKeyDictionary()
        self._undecided: Any = WeakTensorKeyDictionary()
        self._required: Any = WeakTensorKeyDictionary()
        for one in inputs:
            with outside_of_trace():
                value = one.value.clone()  # writes of the model are made to it too
            self._learn(one.traced, value, frozenset((one.name,)))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # torch's form
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called in place of every function of torch."""
        kwargs = kwargs or {}
        if peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        if func in READS:
            return self._read(func, args, kwargs)
        if func in _LEAKS:
            self._known.pop(args[0], None)
        if not is_followed(func):
            return func(*args, **kwargs)
        args, kwargs = self._with_numbers(func, args, kwargs)
        call = self._find_call(func, args, kwargs)
        if call is not None and func in SHAPED_BY_VALUES and self._answer_all(args, kwargs):
            found = compute(func, call.args, call.kwargs)
            if found is not None:
                return self._to_constants(found[0], call.inputs)
        result = func(*args, **kwargs)
        if call is not None:
            self._follow(func, args, kwargs, call, result)
        self._follow_random(func, args, kwargs, result)
        return result

    # ---- what is known

    def _learn(self, traced: Any, value: Any, inputs: frozenset[str]) -> None:
        """Note what a traced tensor holds, unless that is too much or of another form."""
        if not isinstance(traced, torch.Tensor) or not isinstance(value, torch.Tensor):
            return
        is_alike = traced.dtype == value.dtype and traced.dim() == value.dim()
        if is_alike and not value.is_meta and value.numel() <= _MOST and not traced.is_inference():
            self._known[traced] = _Known(value, traced._version, inputs)

    def _find(self, tensor: torch.Tensor) -> _Known | None:
        """Return what is known of a tensor, unless it was written to since."""
        known: _Known | None = self._known.get(tensor)
        return known if known is not None and tensor._version == known.version else None

    def _find_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Call | None:
        """Return a call with real tensors, or None if an argument is not known."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        found = {id(x): self._find(x) for x in leaves if isinstance(x, torch.Tensor)}
        known = {key: one for key, one in found.items() if one is not None}
        is_known = len(known) == len(found) and all(
            id(leaf) in known or is_plain(leaf) for leaf in leaves
        )
        if not is_known or not (known or func in MAKERS):
            return None
        values = [known[id(leaf)].value if id(leaf) in known else leaf for leaf in leaves]
        inputs = frozenset[str]().union(*(one.inputs for one in known.values()))
        real_args, real_kwargs = pytree.tree_unflatten(values, spec)
        return _Call(real_args, real_kwargs, inputs)

    def _follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: _Call,
        result: Any,
    ) -> None:
        """Learn what a call has returned, and what it has written to its arguments."""
        found = compute(func, call.args, call.kwargs)
        if found is None:
            return
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and self._find(leaf) is None:
                self._follow_write(self._known[leaf], call.inputs)
        traced, values = pytree.tree_leaves(result), pytree.tree_leaves(found)
        if len(traced) == len(values):
            for leaf, value in zip(traced, values, strict=True):
                self._learn(leaf, value, call.inputs)

    def _follow_write(self, written: _Known, inputs: frozenset[str]) -> None:
        """Learn that all tensors with this memory hold what was written to it."""
        memory = written.value.untyped_storage()._cdata
        for tensor, known in list(self._known.items()):
            if known.value.untyped_storage()._cdata == memory:
                del self._known[tensor]
                if known.version == written.version != tensor._version:
                    self._learn(tensor, known.value, known.inputs | inputs)

    def _follow_random(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note the range of random numbers, and the answers of comparisons with them."""
        drawn_from = find_range(func, args, kwargs)
        if drawn_from is not None:
            self._drawn[result] = _Drawn(drawn_from, result._version)
            return
        drawn: _Drawn | None = self._drawn.get(args[0]) if is_comparison(func, args) else None
        if drawn is None or drawn.version != args[0]._version:
            return
        answer = decide_comparison(func, drawn.range, args[1])
        if answer is None:
            self._undecided[result] = args[1], calling_line()
        elif all(type(size) is int for size in result.shape):
            with outside_of_trace():
                value = torch.full(tuple(result.shape), answer)
            self._learn(result, value, frozenset())

    def _to_constants(self, values: Any, inputs: frozenset[str]) -> Any:
        """Return constants of the graph with these values."""
        traced = pytree.tree_map(torch.Tensor.clone, values)
        for one, value in zip(*map(pytree.tree_leaves, (traced, values)), strict=True):
            self._learn(one, value, inputs)
        return traced

    # ---- reads

    def _read(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if func is torch.Tensor.__bool__ and args[0] in self._undecided:
            raise RandomPathError(*self._undecided[args[0]])
        value = self._answer(args[0])
        if value is None:
            return func(*args, **kwargs)
        with outside_of_trace():
            return func(value, *args[1:], **kwargs)

    def _answer(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor that the model reads, or None if they are not known."""
        known = self._find(tensor)
        if known is None:
            return None
        if known.inputs and not self._reads.are_answered:
            self._reads.has_missed = True
            return None
        if known.inputs and self._required.get(tensor) != known.version:
            self._required[tensor] = known.version
            with outside_of_trace():
                expected = str(known.value.tolist())
            names = ", ".join(sorted(known.inputs))
            require_values(tensor, expected, names, calling_line())
        return known.value

    def _answer_all(self, *arguments: Any) -> bool:
        tensors = (x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor))
        return all(self._answer(tensor) is not None for tensor in tensors)

    def _with_numbers(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give numbers to a function whose result has a shape that depends on them."""
        if func in MAKERS or func in SIZED:
            kept = 1 if func in SIZED else 0
            numbers, named = pytree.tree_map(self._to_number, (args[kept:], kwargs))
            return (*args[:kept], *numbers), self._find_type(func, args, kwargs) | named
        if func is INDEXING:
            return (args[0], self._to_index(args[1])), kwargs
        if func in REPEATS and "output_size" not in kwargs:
            return args, kwargs | self._output_size(*args, **kwargs)
        return args, kwargs

    def _find_type(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the type of what a function makes of tensors, which numbers do not show."""
        is_copy = func in COPIES and any(
            isinstance(x, torch.Tensor) for x in pytree.tree_leaves(args)
        )
        call = self._find_call(func, args, kwargs) if is_copy else None
        found = None if call is None else compute(func, call.args, call.kwargs)
        return {} if found is None else {"dtype": found[0].dtype}

    def _to_number(self, leaf: Any) -> Any:
        is_number = isinstance(leaf, torch.Tensor) and leaf.dim() == 0
        value = self._answer(leaf) if is_number else None
        if value is None:
            return leaf
        with outside_of_trace():
            return value.item()

    def _to_index(self, index: Any) -> Any:
        """Return an index with positions instead of masks, and numbers as the ends of slices."""
        found: list[Any] = []
        for item in index if isinstance(index, tuple) else (index,):
            if isinstance(item, slice):
                found.append(slice(*map(self._to_number, (item.start, item.stop, item.step))))
            elif isinstance(item, torch.Tensor) and item.dtype == torch.bool and item.dim():
                found += self._to_positions(item)
            else:
                found.append(item)
        return tuple(found) if isinstance(index, tuple) or len(found) > 1 else found[0]

    def _to_positions(self, mask: torch.Tensor) -> list[torch.Tensor]:
        """Return where a mask is true, by dimension, or the mask itself if it is not known."""
        value, known = self._answer(mask), self._find(mask)
        if value is None or known is None:
            return [mask]
        with outside_of_trace():
            positions = torch.nonzero(value, as_tuple=True)
        return list(self._to_constants(positions, known.inputs))

    def _output_size(self, tensor: Any, repeats: Any = None, dim: Any = None) -> dict[str, Any]:
        """Return the size of the result of a `repeat_interleave`, where it is known."""
        counts = tensor if repeats is None else repeats
        value = self._answer(counts) if isinstance(counts, torch.Tensor) else None
        if value is None:
            return {}
        with outside_of_trace():
            total = int(value.sum())
        if repeats is not None and value.numel() == 1:
            total *= tensor.numel() if dim is None else tensor.shape[dim]
        return {"output_size": total}
