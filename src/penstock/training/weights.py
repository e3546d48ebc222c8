"""How the losses of the microbatches add up to the loss of the batch."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from penstock.errors import BatchError

__all__ = ["Reduction", "weigh_losses", "weigh_rows"]

# "mean" over rows, "sum", or a function of a microbatch's target that counts what it averages.
Reduction: TypeAlias = Literal["mean", "sum"] | Callable[[Any], float]


def weigh_losses(
    reduction: Reduction, targets: Sequence[Any], rows: Sequence[float]
) -> list[float]:
    """The factor of each microbatch's loss, so that their sum is the loss of the whole batch.

    A microbatch that counts nothing has weight zero: its loss, a mean over nothing, is to be left
    out. On a rank without targets there are no losses to weigh, and rows stand in for counts.

    >>> weigh_losses("mean", [], [3, 3, 2, 2])
    [0.3, 0.3, 0.2, 0.2]
    >>> weigh_losses(len, ["abc", "d"], [1, 1])
    [0.75, 0.25]
    """
    match reduction:
        case "sum":
            return [1.0] * len(rows)
        case "mean":
            return weigh_rows(rows)
        case _ if callable(reduction):
            counts = [float(reduction(target)) for target in targets]
            return _share(counts, "counts") if counts else weigh_rows(rows)
        case _:
            raise BatchError(
                f"reduction is 'mean', 'sum' or a function of the target (got {reduction!r})"
            )


def weigh_rows(rows: Sequence[float]) -> list[float]:
    """Each microbatch's share of the rows of the batch."""
    return _share(rows, "rows")


def _share(numbers: Sequence[float], name: str) -> list[float]:
    if not all(0 <= number < math.inf for number in numbers) or not any(numbers):
        raise BatchError(
            f"the {name} of the microbatches are {list(numbers)}; one at least must be positive, "
            "and none negative or infinite"
        )
    total = math.fsum(numbers)
    return [number / total for number in numbers]
