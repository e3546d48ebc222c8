"""Checks on the sizes of families, with messages that say what would work."""

import numpy as np

from penstock.errors import SizeError

__all__ = ["require_size", "require_stages_per_rank", "require_whole_number"]

# Scheduling this many forwards takes a few gigabytes.
_MOST_FORWARDS = 10_000_000


def require_size(ranks: int, microbatches: int, stages_per_rank: int = 1) -> None:
    """Raise an error for sizes below 1, or for a schedule too large for any machine."""
    sizes = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for name, value in sizes.items():
        require_whole_number(name, value)
        if value < 1:
            raise SizeError(f"{name} must be at least 1 ({name}: {value})")
    if ranks * microbatches * stages_per_rank > _MOST_FORWARDS:
        given = ", ".join(f"{name}: {value}" for name, value in sizes.items())
        raise SizeError(
            f"a schedule must have at most {_MOST_FORWARDS:,} forwards ({given}); use fewer"
        )


def require_whole_number(name: str, value: object) -> None:
    """Raise an error unless this is a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        is_even = isinstance(value, float) and value.is_integer()
        advice = f"; write {name}={value:.0f}" if is_even else ""
        raise SizeError(f"{name} must be a whole number (got {value!r}){advice}")


def require_stages_per_rank(
    family: str, stages_per_rank: int, wanted: int, instead: str = ""
) -> None:
    """Raise an error for a number of stages per rank that the family does not have."""
    if stages_per_rank != wanted:
        hint = f", or {instead} for more" if instead and stages_per_rank > wanted else ""
        raise SizeError(
            f"{family} has {wanted} stage{'s' * (wanted > 1)} per rank "
            f"(stages_per_rank: {stages_per_rank}); use stages_per_rank={wanted}{hint}"
        )
