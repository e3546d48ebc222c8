"""Problems that tests of the planner share: random ones, and those of the published tables."""

from random import Random

import numpy as np

from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.problem import SchedulingProblem
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary
from tests.facts import VOrderRow, ZeroBubbleRow

__all__ = ["draw_problem", "published_problem"]

# Hidden size and attention heads of the published models; their sequences have 1024 tokens.
_SIZES = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}


def draw_problem(
    random: Random,
    placement: Placement,
    microbatches: int,
    *,
    capacity: float | None = None,
    full_backward: bool = False,
    boundary: Boundary = DEFAULT_BOUNDARY,
) -> SchedulingProblem:
    """Draw uneven seconds and bytes per stage, and links of different speed.

    The memory holds `capacity` microbatches. All numbers are eighths, so that sums are exact.
    """

    def draw(low: int, high: int) -> tuple[float, ...]:
        return tuple(random.randint(low, high) / 8 for _ in range(placement.num_stages))

    activation = draw(4, 16)
    backward, weight = draw(4, 24), draw(0, 24)
    shorter = tuple(max(b, (b + w) * 0.75) for b, w in zip(backward, weight, strict=True))
    ranks = placement.num_ranks
    costs = Costs(
        forward=draw(4, 24),
        backward_input=backward,
        backward_weight=weight,
        full_backward=shorter if full_backward else None,
        transfer=[[random.randint(0, 8) / 8 for _ in range(ranks)] for _ in range(ranks)],
        activation_bytes=activation,
        weight_stash_bytes=[random.choice((0, 0.25, 0.5, 1)) * size for size in activation],
    )
    one = np.bincount(placement.rank_of_stage, activation).max()
    return SchedulingProblem.of(
        costs,
        placement,
        microbatches,
        None if capacity is None else capacity * one,
        boundary=boundary,
    )


def published_problem(
    row: ZeroBubbleRow | VOrderRow, placement: Placement, *, activations: int
) -> SchedulingProblem:
    """Return a row of the published tables, with room for `activations` stages on every rank.

    What is to be short is the longest span of a rank, as papers count.
    """
    hidden, heads = _SIZES[row.model]
    activation = 34 * hidden + 5 * heads * 1024
    costs = Costs(
        forward=row.forward,
        backward_input=row.backward_input,
        backward_weight=row.backward_weight,
        transfer=row.transfer,
        activation_bytes=activation,
        weight_stash_bytes=32 * hidden,
    )
    return SchedulingProblem.of(
        costs.for_each_stage(placement.num_stages),
        placement,
        row.microbatches,
        float(activations * activation),
        boundary="papers",
    )
