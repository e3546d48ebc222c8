"""Ranges of random numbers: some comparisons with them have one answer, whatever is drawn."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["Range", "decide_comparison", "find_range", "is_comparison"]


class Range(NamedTuple):
    """The least and the largest number that may be drawn, and whether the largest may be."""

    low: float
    high: float
    has_high: bool


_TENSOR = torch.Tensor
_UNIT = Range(0.0, 1.0, has_high=False)
_DRAWS = frozenset((torch.rand, torch.rand_like))
_BELOW = frozenset((torch.lt, torch.less, _TENSOR.lt, _TENSOR.less, _TENSOR.__lt__))
_NOT_ABOVE = frozenset(
    (torch.le, torch.less_equal, _TENSOR.le, _TENSOR.less_equal, _TENSOR.__le__)
)
_ABOVE = frozenset((torch.gt, torch.greater, _TENSOR.gt, _TENSOR.greater, _TENSOR.__gt__))
_NOT_BELOW = frozenset(
    (torch.ge, torch.greater_equal, _TENSOR.ge, _TENSOR.greater_equal, _TENSOR.__ge__)
)


def find_range(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Range | None:
    """Return what a function of torch draws from, or None if it draws nothing that we know."""
    if func in _DRAWS:
        return _UNIT
    if func is _TENSOR.uniform_:
        given = dict(zip(("from", "to"), args[1:], strict=False)) | dict(kwargs)
        low, high = given.get("from", 0.0), given.get("to", 1.0)
        # Sums in few bits may be rounded up to the end of the range.
        return Range(low, high, has_high=True) if _are_numbers(low, high) else None
    return None


def is_comparison(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether a call asks if a tensor is below or above a number."""
    is_known = any(func in one for one in (_BELOW, _NOT_ABOVE, _ABOVE, _NOT_BELOW))
    return is_known and len(args) == 2 and _are_numbers(args[1])


def decide_comparison(func: Callable[..., Any], drawn: Range, number: float) -> bool | None:
    """Return the answer that a comparison has for the whole range, or None if it has two."""
    is_below = (
        True if drawn.high < number or (drawn.high == number and not drawn.has_high) else None
    )
    is_below = False if number <= drawn.low else is_below
    is_not_above = True if drawn.high <= number else False if number < drawn.low else None
    if func in _BELOW:
        return is_below
    if func in _NOT_ABOVE:
        return is_not_above
    opposite = is_not_above if func in _ABOVE else is_below
    return None if opposite is None else not opposite


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)
