"""How a loss combines the results of loss functions, as its graph shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from penstock.errors import PipelineError
from penstock.torch_private import tree_leaves

__all__ = [
    "COUNTING",
    "Divisor",
    "LossForm",
    "find_divisors",
    "find_form",
    "find_shares",
    "name_top",
    "read_count",
    "sign_graph",
]

# Operations that save what they counted, or the target whose elements they average.
_COUNTERS = {"NllLossBackward0", "NllLoss2DBackward0"}
_AVERAGES = {
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
    "HuberLossBackward0",
    "MseLossBackward0",
    "SmoothL1LossBackward0",
}
COUNTING = frozenset(_COUNTERS | _AVERAGES)
# The number of the reduction to a mean.
_MEAN = 1
# The number of operations in the signature of a graph, which every step reads.
_SIGNED = 8
# The number of operations in which the terms of a loss are looked for.
_MOST_TERMS = 256
_SUMS = {"SumBackward0", "SumBackward1"}
_MEANS = {"MeanBackward0", "MeanBackward1"}
# Operations whose result is a sum of their inputs, each multiplied by a factor, and of a number.
_LINEAR = {
    *_SUMS,
    *_MEANS,
    "AddBackward0",
    "AddBackward1",
    "SubBackward0",
    "SubBackward1",
    "RsubBackward0",
    "RsubBackward1",
    "NegBackward0",
    "CloneBackward0",
    "AliasBackward0",
    "ToCopyBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "UnsqueezeBackward0",
    "StackBackward0",
    "CatBackward0",
    "SelectBackward0",
    "UnbindBackward0",
}
# Those of them that join several terms.
_STACK = "StackBackward0"
_JOINING = {"AddBackward0", "AddBackward1", _STACK, "CatBackward0"}
# Operations that are linear in one input, if no other input depends on a call.
_PRODUCTS = {"MulBackward0", "MulBackward1"}
_QUOTIENTS = {"DivBackward0", "DivBackward1"}
_NANSUM = "NansumBackward0"
_TOTALS = _SUMS | {_NANSUM}
_CHOOSING = {"IndexBackward0", "MaskedSelectBackward0"}
_WHOLE_MEAN = "MeanBackward0"


@dataclass(frozen=True, slots=True)
class LossForm:
    """The calls that a loss is a sum of, and whether it has other terms.

    `used` are the numbers of the calls that it depends on. `is_linear` says that it is a sum of
    them and of the rest, each multiplied by a factor. `is_scaled` says that some operation lies
    between the loss and the calls.
    """

    used: tuple[int, ...]
    has_rest: bool
    is_linear: bool
    is_scaled: bool


@dataclass(frozen=True, slots=True)
class Divisor:
    """The number that a loss is divided by, and the quotients in its graph.

    `value` has the factors of products too, and `quotient` has not. `shared` is what the term is
    divided by together with others. `is_trained` says that the number has gradients itself,
    `is_chosen` that it is the number of elements that something has chosen.
    """

    value: torch.Tensor | float = 1.0
    quotient: torch.Tensor | float = 1.0
    shared: torch.Tensor | float = 1.0
    quotients: frozenset[Node] = frozenset()
    is_trained: bool = False
    is_chosen: bool = False


@dataclass(slots=True)
class _Walk:
    """What was found in the graph of a loss so far."""

    calls: Mapping[Node, int]
    used: set[int] = field(default_factory=set)
    has_rest: bool = False
    is_linear: bool = True
    is_scaled: bool = False

    def descend(self, node: Node) -> None:
        """Visit a node and the terms that its result is a sum of."""
        if node in self.calls:
            self.used.add(self.calls[node])
            return
        inputs = self._find_summands(node)
        if inputs is not None:
            self.is_scaled = True
            for inner in inputs:
                self.descend(inner)
            return
        reached = _find_below(node, self.calls)
        self.used |= reached
        self.is_linear = self.is_linear and not reached
        self.has_rest = True

    def _find_summands(self, node: Node) -> list[Node] | None:
        """Return the terms that a node sums, each with a factor; None if it does anything else."""
        inputs = [inner for inner, _ in node.next_functions]
        given = [inner for inner in inputs if inner is not None]
        if node.name() in _LINEAR:
            return given
        if node.name() not in _PRODUCTS | _QUOTIENTS:
            return None
        if len(given) > 1:
            given = [inner for inner in given if inner in self.calls or self._reaches(inner)]
        is_divisor = node.name() in _QUOTIENTS and given != inputs[:1]
        return given if len(given) == 1 and not is_divisor else None

    def _reaches(self, node: Node) -> bool:
        return bool(_find_below(node, self.calls))


def find_form(loss: torch.Tensor, edges: Sequence[GradientEdge | None]) -> LossForm:
    """Find which calls a loss consists of; `edges` are those of their results."""
    calls = {edge.node: number for number, edge in enumerate(edges) if edge is not None}
    walk = _Walk(calls)
    if loss.grad_fn is None:
        walk.has_rest = True
    else:
        walk.descend(loss.grad_fn)
    return LossForm(tuple(sorted(walk.used)), walk.has_rest, walk.is_linear, walk.is_scaled)


def find_shares(loss: torch.Tensor, items: float) -> set[bool]:
    """Return whether the terms of a loss are sums that are divided by the items of a batch."""
    found, nodes = set[bool](), [(loss.grad_fn, False)]
    while nodes:
        node, is_divided = nodes.pop()
        if node is None:
            continue
        name = node.name()
        if name in _SUMS or name in _MEANS or name not in _LINEAR | _QUOTIENTS:
            found.add(is_divided and name in _SUMS)
            continue
        if name in _QUOTIENTS:
            other = torch.as_tensor(node._saved_other)  # type: ignore[attr-defined]  # it has that
            is_divided |= other.is_cpu and other.numel() == 1 and float(other) == items
        nodes += [(inner, is_divided) for inner, _ in node.next_functions]
    return found


def find_divisors(loss: torch.Tensor, rows: float) -> tuple[list[Divisor], bool]:
    """Return what the terms of a loss are divided by that are sums, or means of chosen elements.

    The second value says whether the loss is one such term and nothing else. Where a loop makes
    one term for each of the rows, what counts is the divisor of all of them together.
    """
    found, of_rows, others = list[Divisor](), list[Divisor](), 0
    waiting = [(loss.grad_fn, Divisor())]
    for _ in range(_MOST_TERMS):
        if not waiting:
            break
        node, divisor = waiting.pop()
        if node is None:
            continue
        name = node.name()
        terms = found
        if name in _TOTALS | _MEANS and _is_below(node, partial(_is_row, rows=rows), _STACK):
            terms = of_rows
        if name == _WHOLE_MEAN and _is_below(node, lambda inner: inner.name() in _CHOOSING):
            size = float(node._saved_self_sym_numel)  # type: ignore[attr-defined]  # it has that
            value, quotient = divisor.value * size, divisor.quotient * size
            terms.append(replace(divisor, value=value, quotient=quotient, is_chosen=True))
        elif name in _TOTALS or (name in _MEANS and divisor.quotients):
            is_counted = name == _NANSUM and bool(divisor.quotients)
            terms.append(replace(divisor, is_chosen=is_counted))
        else:
            inputs = _find_divided(node, divisor)
            waiting += inputs
            others += not inputs
    if of_rows and not len(of_rows) % rows:
        others += len(of_rows)
        # As many as there are loops, since microbatches may differ in their rows.
        of_rows = list({id(one.shared): Divisor(one.shared) for one in of_rows}.values())
    found += of_rows
    return found, len(found) == 1 and not others and not waiting


def _find_divided(node: Node, divisor: Divisor) -> list[tuple[Node, Divisor]]:
    """Return the terms whose sum a node is, times numbers; nothing if it is anything else."""
    name, inputs = node.name(), [inner for inner, _ in node.next_functions if inner is not None]
    if name in _LINEAR - _MEANS:
        below = replace(divisor, shared=divisor.value) if name in _JOINING else divisor
        return [(inner, below) for inner in inputs]
    is_divided = name in _QUOTIENTS and node.next_functions[0][0] is not None
    if not is_divided and (name not in _PRODUCTS or len(inputs) != 1):
        return []
    factor = _read_factor(node)
    if factor is None:
        return []
    below = replace(
        divisor,
        value=divisor.value * factor if is_divided else divisor.value / factor,
        quotient=divisor.quotient * factor if is_divided else divisor.quotient,
        quotients=divisor.quotients | ({node} if is_divided else set()),
        is_trained=divisor.is_trained or len(inputs) > 1,
    )
    return [(inputs[0], below)]


def _is_below(node: Node | None, is_it: Callable[[Node], bool], until: str = "") -> bool:
    """Whether one of the operations that a result is made of, in the first place, is like this."""
    for _ in range(_SIGNED):
        if node is None or not node.next_functions or node.name() == until:
            return False
        if is_it(node):
            return True
        node = node.next_functions[0][0]
    return False


def _is_row(one: Any, rows: float) -> bool:
    """Whether an operation takes one of the rows, by its number or in a loop over all of them."""
    if one.name() == "SelectBackward0":
        return not one._saved_dim and bool(one._saved_self_sym_sizes[0] == rows)
    is_loop = one.name() == "UnbindBackward0" and not one._saved_dim
    return is_loop and len(one._input_metadata) == rows


def _read_factor(node: Node) -> torch.Tensor | None:
    """Return the number that a quotient divides by, or a product multiplies with."""
    is_second = node.next_functions[0][0] is not None
    name = "_saved_other" if is_second else "_saved_self"
    try:
        factor = getattr(node, name)
    except RuntimeError:
        # It was written to meanwhile.
        return None
    is_number = isinstance(factor, torch.Tensor) and factor.numel() == 1
    return factor.detach().double() if is_number else None


def _find_below(node: Node, calls: Mapping[Node, int]) -> set[int]:
    """Return the calls that a node depends on; nodes older than all calls are skipped."""
    oldest = min((call._sequence_nr() for call in calls), default=0)
    found, seen, stack = set[int](), {node}, [node]
    while stack:
        for inner, _ in stack.pop().next_functions:
            if inner is None or inner in seen or inner._sequence_nr() < oldest:
                continue
            seen.add(inner)
            if inner in calls:
                found.add(calls[inner])
            else:
                stack.append(inner)
    return found


def name_top(loss: torch.Tensor) -> str:
    """Name the last operation of a loss, which shows if the loss is computed in another way."""
    return "nothing" if loss.grad_fn is None else _name(loss.grad_fn)


def sign_graph(loss: torch.Tensor, output: Any) -> str:
    """Name the last operations of a loss, down to the output of the model.

    Losses that are computed in different ways almost always have different signatures.
    """
    if isinstance(output, torch.Tensor):
        outputs = {output.grad_fn}
    else:
        ends = tree_leaves(output)
        outputs = {end.grad_fn for end in ends if isinstance(end, torch.Tensor)}
    names: list[str] = []
    nodes = [loss.grad_fn]
    # The list grows meanwhile, by what lies below each node.
    for node in islice(nodes, _SIGNED):
        if node is None or node in outputs:
            names.append(".")
        else:
            names.append(_name(node))
            nodes += [inner for inner, _ in node.next_functions]
    return " ".join(names)


def _name(node: Node) -> str:
    # The same operation computes means and sums.
    if _has_reduction(type(node)):
        reduction: int = node._saved_reduction  # type: ignore[attr-defined]  # it has that
        if reduction != _MEAN:
            return f"{node.name()} ({reduction})"
    return node.name()


@lru_cache(maxsize=1024)
def _has_reduction(kind: type[Node]) -> bool:
    """Whether nodes of this class say how they reduce; asking a node that does not is slow."""
    return hasattr(kind, "_saved_reduction")


def read_count(loss: torch.Tensor, top: str) -> torch.Tensor | float | None:
    """Return what the last operation of a loss, named `top`, counted, if it saves that."""
    try:
        return _read_saved_count(loss.grad_fn, top)
    except PipelineError:
        # A forward that saves only its inputs. Its RECOMPUTE makes the loss again, and counts.
        return None


def _read_saved_count(node: Node | None, top: str) -> torch.Tensor | float | None:
    if top in _COUNTERS:
        counted: torch.Tensor = node._saved_total_weight  # type: ignore[union-attr]  # it has that
        return counted
    if top in _AVERAGES:
        return float(node._saved_target.numel())  # type: ignore[union-attr]  # it has that
    return None
