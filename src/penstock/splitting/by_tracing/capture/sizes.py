"""Sizes of a traced model's inputs, and the conditions that they must meet."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]  # it ships no types
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from penstock.splitting.by_tracing.capture.entry import Rule, TracedInput
from penstock.splitting.by_tracing.capture.user_code import is_user_code
from penstock.torch_private import PythonPrinter

__all__ = ["describe_inputs", "find_rules", "hint_of"]


def describe_inputs(
    leaves: Sequence[tuple[str, Any]], nodes: Sequence[fx.Node]
) -> tuple[TracedInput, ...]:
    """Return each leaf of the arguments, with its sizes in the trace."""
    remaining = iter(nodes)
    result = []
    for name, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            sizes = tuple(_show(size) for size in next(remaining).meta["val"].shape)
            result.append(TracedInput(name, sizes, tuple(leaf.shape)))
        else:
            result.append(TracedInput(name, None, leaf))
    return tuple(result)


def find_rules(nodes: Sequence[fx.Node], *, is_oblivious: bool) -> tuple[Rule, ...]:
    """Return the conditions on the sizes of these inputs under which the traced path is right.

    Equality of sizes is always required. Other conditions are required only if they come from the
    model's own code, because kernels that choose by size choose again in every call.
    """
    symbols = {
        size.node.expr
        for node in nodes
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol)
    }
    rules = [
        Rule(_print(expression), place)
        for environment in _environments(nodes)
        for expression, place in _guards(environment)
        if expression.free_symbols <= symbols
    ]
    if not is_oblivious:
        rules += [Rule(f"{s.name} >= 2", "sizes 0 and 1 are special") for s in symbols]
    return tuple(dict.fromkeys(sorted(rules, key=lambda rule: rule.expression)))


def hint_of(size: int | torch.SymInt) -> int:
    """Return the size that the example has."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return 1 if hint is None else int(hint)
    return int(size)


def _environments(nodes: Sequence[fx.Node]) -> Iterator[ShapeEnv]:
    for node in nodes[:1]:
        environment = node.meta["val"].fake_mode.shape_env
        if environment is not None:
            yield environment


def _guards(environment: ShapeEnv) -> Iterator[tuple[sympy.Basic, str]]:
    for guard in environment.guards:
        expression = environment.replace(guard.expr)
        frame = guard.sloc.framework_loc
        file = Path(getattr(frame, "filename", ""))
        is_relevant = isinstance(expression, sympy.Eq) or is_user_code(file)
        if is_relevant and expression not in (sympy.true, sympy.false):
            yield expression, f"{file.name}:{getattr(frame, 'lineno', '?')}"


def _show(size: int | torch.SymInt) -> int | str:
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return int(expression) if isinstance(expression, sympy.Integer) else _print(expression)


def _print(expression: sympy.Basic) -> str:
    return str(PythonPrinter().doprint(expression))
