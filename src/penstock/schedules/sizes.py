"""The checks that every family makes on its sizes, with one way of saying what would work."""

from penstock.errors import SizeError

__all__ = ["require_stages_per_rank"]


def require_stages_per_rank(
    family: str, stages_per_rank: int, wanted: int, instead: str = ""
) -> None:
    """Refuse a number of stages per rank that the family does not have."""
    if stages_per_rank != wanted:
        hint = f", or {instead} for more" if instead and stages_per_rank > wanted else ""
        raise SizeError(
            f"{family} has {wanted} stage{'s' * (wanted > 1)} per rank "
            f"(stages_per_rank: {stages_per_rank}); use stages_per_rank={wanted}{hint}"
        )
