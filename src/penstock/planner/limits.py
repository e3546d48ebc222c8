"""Limits in bytes per rank: what may be given, and the part of them that orders can fill.

                  3 activations   3 and a stash      4 activations
bytes       ------------|---------------|------------------|--------
limits           the same orders  the same orders   the same orders

Between two sums no order fits that did not fit before. So plans take the lower one: limits that
allow the same orders get the same plan, and what is found does not depend on bytes that nothing
can use. More than everything takes is as good as no limit.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from penstock.errors import ArgumentError, SizeError
from penstock.ir.rows import Floats
from penstock.untrusted import quote, to_quantity

__all__ = ["count_bytes", "read_limits", "usable_capacity"]

# As many sums as this are looked at; the capacity of a rank that has more is left unchanged.
_MOST_SUMS = 200_000

# A sum of bytes that just fits is not refused because of its last bit.
_GRACE = 1e-12


def usable_capacity(
    capacity: float, stages: Sequence[tuple[float, float]], microbatches: int
) -> float:
    """Return the most bytes up to `capacity` that a rank with these stages can hold.

    Each stage has the bytes of an activation and of what is left after I; a microbatch holds one
    of both, or neither.

    >>> usable_capacity(35.0, [(10.0, 4.0)], 8), usable_capacity(1e9, [(10.0, 4.0)], 8)
    (34.0, 80.0)
    """
    if capacity < 0:
        return capacity
    most = sum(microbatches * max(sizes) for sizes in stages)
    if most <= capacity * (1 + _GRACE):
        return most
    sums = np.zeros(1)
    each = (microbatches + 1) * (microbatches + 2) // 2
    for sizes in stages[:-1]:
        if len(sums) * each > _MOST_SUMS:
            return capacity
        sums = np.add.outer(sums, _counted(sizes, microbatches)).ravel()
        sums = np.unique(sums[sums <= capacity * (1 + _GRACE)])
    if len(sums) * (microbatches + 1) > _MOST_SUMS:
        return capacity
    return float((sums + _most_of_last(capacity - sums, stages[-1], microbatches)).max())


def _counted(sizes: tuple[float, float], microbatches: int) -> Floats:
    """Return the sums of a stage's activations and stashes, for all numbers of microbatches."""
    activation, stash = sizes
    first, second = np.triu_indices(microbatches + 1)
    sums: Floats = np.unique(first * activation + (second - first) * stash)
    return sums


def _most_of_last(left: Floats, sizes: tuple[float, float], microbatches: int) -> Floats:
    """Return the largest sum of one stage's bytes that fits into each of these capacities."""
    activation, stash = sizes
    number = np.arange(microbatches + 1)
    held, others = number * activation, microbatches - number
    rest = left[:, None] - held
    stashes = np.broadcast_to(others.astype(np.float64), rest.shape)
    if stash > 0:
        stashes = np.minimum(np.floor(np.maximum(rest, 0.0) / stash + _GRACE), others)
    fits = held <= left[:, None] * (1 + _GRACE)
    most: Floats = np.where(fits, held + stashes * stash, 0.0).max(axis=1)
    return most


def read_limits(memory: float | Sequence[float] | None, ranks: int) -> tuple[float, ...]:
    """Return the bytes of every rank from what a user gives: none, one number or one per rank."""
    if memory is None:
        return (inf,) * ranks
    values: object = memory
    is_list = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
    given: list[Any] = list(memory) if is_list else [memory]  # type: ignore[arg-type]  # a list
    limits = [inf if limit == inf else to_quantity(limit) for limit in given]
    for limit, value in zip(limits, given, strict=True):
        if limit is None:
            raise ArgumentError(
                "memory must be a number of bytes from 0, or one per rank "
                f"(got {quote(value)}); write 80e9 for 80 GB"
            )
    if is_list and len(limits) != ranks:
        raise SizeError(
            f"memory must be one limit, or one per rank (ranks: {ranks}, got {len(limits)})"
        )
    return tuple(limits if is_list else limits * ranks)  # type: ignore[arg-type]  # checked above


def count_bytes(value: float) -> str:
    """Return a number of bytes for a message; small ones with their fraction.

    >>> count_bytes(80e9), count_bytes(0.30000001), count_bytes(12)
    ('80,000,000,000', '0.3', '12')
    """
    is_whole = value == round(value) if value < inf else True
    return f"{value:,.0f}" if is_whole or value >= 1000 else f"{value:.4g}"
