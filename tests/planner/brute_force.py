"""The best cuts by looking at all of them: what `partition` must agree with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from penstock.ir.placement import Placement
from penstock.planner.partition.pieces import Piece

__all__ = ["Score", "all_scores"]


@dataclass(frozen=True, order=True)
class Score:
    """What counts, in order: the smaller, the better."""

    slowest_stage: float
    slowest_rank: float
    squares: float


def all_scores(
    pieces: Sequence[Piece],
    placement: Placement,
    memory: Sequence[float],
    in_flight: Sequence[int],
) -> Iterator[tuple[Score, float]]:
    """Yield the score of every cut, with the bytes by which the worst rank exceeds its memory."""
    for inner in combinations(range(1, len(pieces)), placement.num_stages - 1):
        stages = [pieces[a:b] for a, b in pairwise((0, *inner, len(pieces)))]
        seconds = [sum(piece.seconds for piece in stage) for stage in stages]
        held = [
            sum(piece.parameter_bytes + count * piece.activation_bytes for piece in stage)
            for stage, count in zip(stages, in_flight, strict=True)
        ]
        ranks = [placement.stages(rank) for rank in range(placement.num_ranks)]
        slowest_rank = max(sum(seconds[s] for s in rank) for rank in ranks)
        score = Score(max(seconds), slowest_rank, sum(second**2 for second in seconds))
        excess = [
            sum(held[s] for s in rank) - cap for rank, cap in zip(ranks, memory, strict=True)
        ]
        yield score, max(excess)
