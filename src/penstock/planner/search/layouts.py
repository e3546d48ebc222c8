"""The placements to choose from."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from penstock.costs import PER_STAGE, Costs
from penstock.errors import ArgumentError, SizeError
from penstock.ir.placement import Placement

__all__ = [
    "Layout",
    "describe_placement",
    "find_placement",
    "placements_for",
    "regular_placements",
]

Layout: TypeAlias = Literal["loop", "interleaved", "v"]

# More stages per rank than these gain little, cost messages, and take long to cut well.
_MOST_PER_RANK = {"loop": 3, "v": 4}


def find_placement(layout: Placement | str, ranks: int, costs: Costs) -> Placement:
    """Return the placement that a user has named, with the number of stages of the costs.

    "loop" is one stage per rank; "interleaved" and "v" are two, unless costs are per stage.
    """
    if isinstance(layout, Placement):
        if layout.num_ranks != ranks:
            raise SizeError(f"the placement must have {ranks} ranks (got {layout.num_ranks})")
        return layout
    per_rank = max(2, _stages_given(costs) // ranks)
    match layout:
        case "loop":
            return Placement.loop(ranks)
        case "interleaved":
            return Placement.loop(ranks, per_rank)
        case "v":
            return Placement.v(ranks, per_rank)
        case _:
            raise ArgumentError(
                f"placement must be 'loop', 'interleaved', 'v' or a Placement (got {layout!r})"
            )


def placements_for(costs: Costs, ranks: int) -> tuple[Placement, ...]:
    """Return the regular placements of a model with these costs.

    Costs per stage fix the number of stages; single numbers are a share of a model that may be
    cut in any way.
    """
    stages = _stages_given(costs)
    if not stages:
        return regular_placements(ranks, most_stages=2 * ranks)
    if stages % ranks:
        raise SizeError(
            f"{stages} stages do not come out even on {ranks} ranks; use a number of ranks that "
            "divides them, or give a Placement"
        )
    per_rank = stages // ranks
    return _distinct([Placement.loop(ranks, per_rank), Placement.v(ranks, per_rank)])


def regular_placements(ranks: int, most_stages: int) -> tuple[Placement, ...]:
    """Return loops of up to three stages per rank and Vs of two and four, the simplest first."""
    loops = [Placement.loop(ranks, turns) for turns in range(1, _MOST_PER_RANK["loop"] + 1)]
    vees = [Placement.v(ranks, turns) for turns in range(2, _MOST_PER_RANK["v"] + 1, 2)]
    found = sorted([*loops, *vees], key=lambda placement: placement.num_stages)
    return _distinct([p for p in found if p.num_stages <= most_stages])


def describe_placement(placement: Placement) -> str:
    """Return a word for a placement, with the stages per rank where they are unusual.

    >>> describe_placement(Placement.v(4)), describe_placement(Placement.loop(4, 3))
    ('v', 'interleaved x3')
    """
    per_rank = placement.num_stages / placement.num_ranks
    usual = 1 if placement.style == "loop" else 2
    return placement.style if per_rank == usual else f"{placement.style} x{per_rank:g}"


def _stages_given(costs: Costs) -> int:
    """Return the number of stages of the costs; 0 where single numbers are for any."""
    lengths = {
        name: len(value)
        for name in PER_STAGE
        if isinstance(value := getattr(costs, name), Sequence)
    }
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise SizeError(f"costs per stage must be for one number of stages (got {given})")
    return next(iter(lengths.values()), 0)


def _distinct(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Drop repeats: on one rank, or with one stage per rank, a loop and a V are the same."""
    return tuple(dict.fromkeys(placements))
