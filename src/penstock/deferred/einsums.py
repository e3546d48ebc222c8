"""Einsums of two operands, recognised as products with a weight."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from penstock.deferred.products import Product, Pull
from penstock.deferred.work import WeightPart

__all__ = ["find_einsum"]


def find_einsum(equation: Any, first: Any, second: Any) -> Product | None:
    """Recognise an einsum of two operands, whose gradients are einsums too."""
    if not isinstance(equation, str) or not isinstance(second, torch.Tensor):
        return None
    terms = _terms_of(equation)
    if terms is None:
        return None
    of_first, of_second, of_output = terms
    if type(first) is torch.Tensor:
        value, weight, of_value, of_weight = first, second, of_first, of_second
    else:
        weight, value, of_weight, of_value = first, second, of_first, of_second
    sizes = dict(zip(of_value, value.shape, strict=True))
    # If a dimension of size one is broadcast, the gradient is a sum.
    is_spread = any(
        sizes.get(name, size) != size for name, size in zip(of_weight, weight.shape, strict=True)
    )
    if is_spread:
        return None
    found = _einsums_of(of_value, of_weight, of_output)
    return None if found is None else (weight, (value,), *found)


@lru_cache(maxsize=1024)
def _terms_of(equation: str) -> tuple[str, str, str] | None:
    """Return the names of both operands and of the output, unless it is another kind of einsum."""
    sides = equation.replace(" ", "").split("->")
    terms = sides[0].split(",")
    if len(sides) != 2 or len(terms) != 2:
        return None
    first, second, output = (*terms, sides[1])
    if any(not term.isalpha() or len(set(term)) < len(term) for term in (first, second, output)):
        return None
    return first, second, output


@lru_cache(maxsize=1024)
def _einsums_of(
    of_value: str, of_weight: str, of_output: str
) -> tuple[Callable[..., None], Pull | None] | None:
    """Return how to compute the gradients of both operands; cached, since equations repeat."""
    if not set(of_weight) <= {*of_value, *of_output}:
        return None
    add = partial(_add_einsum, f"{of_output},{of_value}->{of_weight}")
    if not set(of_value) <= {*of_weight, *of_output}:
        return add, None
    return add, partial(_pull_einsum, f"{of_output},{of_weight}->{of_value}")


def _add_einsum(
    equation: str, part: WeightPart, gradient: torch.Tensor, value: torch.Tensor
) -> None:
    part.add(torch.einsum(equation, gradient, value))


def _pull_einsum(
    equation: str,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    _: object,
    needs_value: bool,
    __: bool,
) -> tuple[torch.Tensor | None, None]:
    return torch.einsum(equation, gradient, weight) if needs_value else None, None
