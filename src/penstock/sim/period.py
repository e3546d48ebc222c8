"""What a step costs when it is repeated, by what happens between two steps.

boundary      between two steps                                           a step costs
everything    all ranks wait until the last one is done                   the end time
gradients     all ranks wait until the last one has its gradients,        the end time, if the
              then each runs its optimizer: clipping by the norm of       optimizer takes no time
              all, tied parameters, reductions over replicas
nothing       every rank continues by itself                              the period
papers        every rank repeats its times of the first step              the longest span

On the same order, `nothing` costs at most as much as `papers`, and that as much as `everything`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from penstock.errors import ArgumentError
from penstock.ir.rows import Floats
from penstock.untrusted import quote, to_quantity

__all__ = [
    "BOUNDARIES",
    "DEFAULT_BOUNDARY",
    "Boundary",
    "Period",
    "describe_seconds",
    "name_seconds",
    "read_optimizer_seconds",
    "require_boundary",
]

Boundary: TypeAlias = Literal["everything", "gradients", "nothing", "papers"]
BOUNDARIES: tuple[Boundary, ...] = get_args(Boundary)

# What `Pipeline.step` does: its ranks meet at the end of every step.
DEFAULT_BOUNDARY: Boundary = "everything"

_NAMES: dict[Boundary, str] = {
    "everything": "end time",
    "gradients": "gradient time",
    "nothing": "period",
    "papers": "longest span",
}
_MEANINGS: dict[Boundary, str] = {
    "everything": "from the first start to the end of the last rank",
    "gradients": "from the first start until every rank has its gradients",
    "nothing": "from step to step, if no rank waits for another between steps",
    "papers": "the longest time of one rank from its first action to its last, as papers count",
}


@dataclass(frozen=True, slots=True)
class Period:
    """The seconds of a repeated step, and how long each rank is busy in it."""

    boundary: Boundary
    seconds: float
    busy_seconds: tuple[float, ...]

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Per rank, the seconds of the step in which it is idle; rounding errors count as 0."""
        least = 1e-12 * self.seconds
        gaps = (self.seconds - busy for busy in self.busy_seconds)
        return tuple(gap if gap > least else 0.0 for gap in gaps)

    @property
    def rank_bubble_rates(self) -> tuple[float, ...]:
        """Per rank, the share of the step in which it is idle."""
        return tuple(idle / self.seconds if self.seconds else 0.0 for idle in self.idle_seconds)

    @property
    def bubble_rate(self) -> float:
        """The share of the step in which ranks are idle, over all ranks."""
        whole = self.seconds * len(self.busy_seconds)
        return sum(self.idle_seconds) / whole if whole else 0.0


def name_seconds(boundary: Boundary) -> str:
    """Return the name of a step's seconds, for headings.

    >>> name_seconds("everything"), name_seconds("papers")
    ('end time', 'longest span')
    """
    return _NAMES[boundary]


def describe_seconds(boundary: Boundary) -> str:
    """Return what a step's seconds are, as the rest of a sentence."""
    return _MEANINGS[boundary]


def require_boundary(boundary: object) -> None:
    """Raise an error unless this is a boundary."""
    if boundary not in BOUNDARIES:
        known = ", ".join(map(repr, BOUNDARIES))
        raise ArgumentError(f"boundary must be one of {known} (got {quote(boundary)})")


def read_optimizer_seconds(given: object, ranks: int) -> Floats:
    """Return the seconds of every rank from one number for all, or one per rank."""
    is_list = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str)
    numbers = [to_quantity(one) for one in given] if is_list else [to_quantity(given)] * ranks  # type: ignore[attr-defined]  # a list
    if None in numbers or len(numbers) != ranks:
        raise ArgumentError(
            "optimizer_seconds must be a number from 0, or one for each of the "
            f"{ranks} ranks (got {quote(given)})"
        )
    return np.array(numbers, dtype=np.float64)
