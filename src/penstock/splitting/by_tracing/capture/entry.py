"""Arguments of a traced model: their conversion to a list of tensors, and the sizes allowed.

Tracing follows one path through the model's code. If that path depends on a size, or on an
argument that is not a tensor, the graph is right for this path only. A call that would take
another path is refused.
"""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

import torch

from penstock.errors import BatchError
from penstock.torch_private import pytree

__all__ = [
    "Entry",
    "Rule",
    "TracedInput",
    "bind_arguments",
    "flatten_arguments",
    "pack_spec",
    "unpack_spec",
]


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that held for the sizes of the example, as an expression of their symbols."""

    expression: str
    place: str


@dataclass(frozen=True, slots=True)
class TracedInput:
    """One leaf of the arguments: a tensor's sizes as numbers or expressions, or a constant."""

    name: str
    sizes: tuple[int | str, ...] | None
    example: Any


@dataclass(frozen=True)
class Entry:
    """The arguments that a model was traced with."""

    signature: inspect.Signature
    spec: pytree.TreeSpec
    inputs: tuple[TracedInput, ...]
    rules: tuple[Rule, ...]
    _accepted: set[tuple[torch.Size, ...]] = field(default_factory=set, compare=False)

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among the arguments, in the order of the graph's inputs."""
        try:
            named, spec = flatten_arguments(self.signature, args, kwargs)
        except TypeError as error:
            raise BatchError(f"the arguments must fit {self.signature}: {error}") from error
        if spec != self.spec:
            self._refuse_structure([name for name, _ in named])
        tensors = []
        for traced, (_, value) in zip(self.inputs, named, strict=True):
            if traced.sizes is None:
                _check_constant(traced, value)
            elif isinstance(value, torch.Tensor):
                tensors.append(value)
            else:
                raise BatchError(
                    f"{traced.name} must be a tensor, as in the example (got {value!r})"
                )
        if not torch.compiler.is_compiling():
            self._check_sizes(tensors)
        return tensors

    def _refuse_structure(self, given: list[str]) -> None:
        traced = [traced.name for traced in self.inputs]
        missing = [name for name in traced if name not in given]
        extra = [name for name in given if name not in traced]
        parts = [f"{', '.join(missing)} missing"] if missing else []
        parts += [f"{', '.join(extra)} not in the example"] if extra else []
        raise BatchError(
            f"the model was traced with the arguments {', '.join(traced)} "
            f"({'; '.join(parts) or 'they are nested differently'}); "
            "give an example with the arguments that you train with"
        )

    def _check_sizes(self, tensors: Sequence[torch.Tensor]) -> None:
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes in self._accepted:
            return
        traced = [one for one in self.inputs if one.sizes is not None]
        symbols = _bind_symbols(traced, shapes)
        for one, shape in zip(traced, shapes, strict=True):
            _check_shape(one, shape, symbols)
        for rule in self.rules:
            if not _evaluate(rule.expression, symbols):
                raise BatchError(_explain(rule, traced, symbols))
        self._accepted.add(shapes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_accepted": set(), "spec": pack_spec(self.spec)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"spec": unpack_spec(state["spec"])})


def pack_spec(spec: pytree.TreeSpec) -> Any:
    """Return the structure of a tree as plain data."""
    if spec.is_leaf():
        return ()
    return spec.type, spec.context, [pack_spec(child) for child in spec.children()]


def unpack_spec(data: Any) -> pytree.TreeSpec:
    """Return the structure that `pack_spec` made into data."""
    if not data:
        return pytree.tree_structure(0)
    kind, context, children = data
    return pytree.TreeSpec(kind, context, [unpack_spec(child) for child in children])


def bind_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Bind arguments to parameters, so that all ways to pass them have one form."""
    bound = signature.bind(*args, **kwargs)
    parameters = signature.parameters
    if not any(
        parameters[name].kind is inspect.Parameter.VAR_POSITIONAL for name in bound.arguments
    ):
        for name, value in list(bound.arguments.items()):
            if value is parameters[name].default and not isinstance(value, torch.Tensor):
                del bound.arguments[name]
    return bound


def flatten_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """Return the leaves of the arguments with their names, and their tree."""
    bound = bind_arguments(signature, args, kwargs)
    leaves, spec = pytree.tree_flatten_with_path((bound.args, bound.kwargs))
    positions = _name_positions(signature, len(bound.args))
    return [(_name(path, positions), value) for path, value in leaves], spec


def _name_positions(signature: inspect.Signature, count: int) -> list[str]:
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names.extend(f"{parameter.name}[{i}]" for i in range(count - len(names)))
        else:
            names.append(parameter.name)
    return names


def _name(path: tuple[Any, ...], positions: Sequence[str]) -> str:
    side, key, *rest = path
    start = positions[key.idx] if side.idx == 0 else key.key
    return f"{start}{pytree.keystr(tuple(rest))}"


def _check_constant(traced: TracedInput, value: Any) -> None:
    is_same = value is traced.example or (
        type(value) is type(traced.example)
        and not isinstance(value, torch.Tensor)
        and value == traced.example
    )
    if not is_same:
        raise BatchError(
            f"{traced.name} was {traced.example!r} when the model was traced, but is {value!r}; "
            "trace with an example that has this value, because only tensors may vary"
        )


def _bind_symbols(traced: Sequence[TracedInput], shapes: Sequence[torch.Size]) -> dict[str, int]:
    symbols: dict[str, int] = {}
    for one, shape in zip(traced, shapes, strict=True):
        for size, given in zip(one.sizes or (), shape, strict=False):
            if isinstance(size, str) and size.isidentifier():
                symbols.setdefault(size, given)
    return symbols


def _check_shape(one: TracedInput, shape: torch.Size, symbols: Mapping[str, int]) -> None:
    sizes = one.sizes or ()
    if len(sizes) != len(shape):
        raise BatchError(
            f"{one.name} had {len(sizes)} dimensions when the model was traced, "
            f"but has {len(shape)}"
        )
    for dimension, (size, given) in enumerate(zip(sizes, shape, strict=True)):
        expected = size if isinstance(size, int) else _evaluate(size, symbols)
        if expected != given:
            example = one.example[dimension]
            reason = (
                "" if isinstance(size, int) else ", which follows from another argument's size"
            )
            raise BatchError(
                f"{one.name} has size {given} in dimension {dimension}, but the traced model "
                f"takes {expected}{reason} (in the example: {example}); trace with an example of "
                "this size, and of at least 2 where the size is to vary"
            )


def _explain(rule: Rule, traced: Sequence[TracedInput], symbols: Mapping[str, int]) -> str:
    places = {
        symbol: f"{one.name}.shape[{dimension}]"
        for one in reversed(traced)
        for dimension, symbol in enumerate(one.sizes or ())
        if isinstance(symbol, str) and symbol in symbols
    }
    used = [name for name in _compile(rule.expression).co_names if name in places]
    sizes = ", ".join(f"{places[symbol]} = {symbols[symbol]}" for symbol in used)
    named = rule.expression
    for symbol in sorted(used, key=len, reverse=True):
        named = re.sub(rf"\b{symbol}\b", places[symbol], named)
    return (
        f"the model was traced where {named} ({rule.place}), but {sizes}; "
        "trace with an example of this size"
    )


def _evaluate(expression: str, symbols: Mapping[str, int]) -> Any:
    # The functions that torch prints in expressions of sizes.
    functions = {"min": min, "max": max, "abs": abs, "round": round, "int": int}
    names = {**functions, "math": math, "torch": torch, "__builtins__": {}}
    return eval(_compile(expression), names, dict(symbols))


@cache
def _compile(expression: str) -> CodeType:
    return compile(expression, "<sizes>", "eval")
