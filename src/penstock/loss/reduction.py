"""How the losses of the microbatches add up to the loss of the batch."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from penstock.errors import ArgumentError, BatchError

__all__ = ["Reduction", "require_reduction", "round_weights", "share_counts", "weigh_rows"]

# "auto" for the loss of the unsplit model, "mean" over rows, "sum", or a function that takes a
# microbatch's target or labels and returns how much the loss counts in it.
Reduction: TypeAlias = Literal["auto", "mean", "sum"] | Callable[[Any], float]


def require_reduction(reduction: Reduction) -> None:
    """Raise if this is not a reduction."""
    if not callable(reduction) and reduction not in ("auto", "mean", "sum"):
        raise ArgumentError(
            "reduction must be 'auto', 'mean', 'sum' or a function of a target or of labels (got "
            f"{reduction!r}); leave it out to find it from the loss"
        )


def share_counts(counts: Sequence[float]) -> list[float]:
    """Return each microbatch's share of what the loss of the batch is a mean over.

    A microbatch that counts nothing has weight zero, and its loss, which may be NaN, is left out.

    >>> share_counts([3, 0, 1])
    [0.75, 0.0, 0.25]
    """
    return list(_share(tuple(counts), "counts"))


def weigh_rows(rows: Sequence[float]) -> list[float]:
    """Return each microbatch's share of the rows of the batch."""
    return list(_share(tuple(rows), "rows"))


# From the cache, because most steps have the rows and counts of the step before.
@lru_cache(maxsize=64)
def _share(numbers: tuple[float, ...], name: str) -> tuple[float, ...]:
    if not all(0 <= number < math.inf for number in numbers) or not any(numbers):
        raise BatchError(
            f"the {name} of the microbatches must be finite, none negative and not all of them "
            f"zero (got {list(numbers)}); leave out a batch that has nothing to count"
        )
    total = math.fsum(numbers)
    return tuple([number / total for number in numbers])


def round_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights without what rounding may change from rank to rank.

    >>> round_weights([1 / 3, 2 / 3])
    (0.3333333333, 0.6666666667)
    """
    return tuple(round(weight, 10) for weight in weights)
