"""Which rank holds which stage.

loop  rank 0: 0 4      V  rank 0: 0 7
      rank 1: 1 5         rank 1: 1 6
      rank 2: 2 6         rank 2: 2 5
      rank 3: 3 7         rank 3: 3 4
"""

from dataclasses import dataclass

from penstock.errors import ScheduleError

__all__ = ["Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank holds each stage: `Placement((0, 1, 1, 0))` is the V over two ranks.

    >>> Placement.v(ranks=2) == Placement((0, 1, 1, 0))
    True
    >>> Placement.loop(ranks=2, stages_per_rank=2).stages(1)
    (1, 3)
    """

    rank_of_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rank_of_stage:
            raise ScheduleError("a placement needs at least one stage")
        idle = set(range(max(self.rank_of_stage) + 1)) - set(self.rank_of_stage)
        if idle or min(self.rank_of_stage) < 0:
            raise ScheduleError(
                f"every rank from 0 up must hold a stage (placement: {self.rank_of_stage}, "
                f"without a stage: {sorted(idle)}); number the ranks without gaps"
            )

    @classmethod
    def loop(cls, ranks: int, stages_per_rank: int = 1) -> "Placement":
        """Place stages round the ranks: stage s on rank s mod ranks."""
        return cls(tuple(range(ranks)) * stages_per_rank)

    @classmethod
    def v(cls, ranks: int, stages_per_rank: int = 2) -> "Placement":
        """Place stages down the ranks and back up, so that the turn stays on one rank."""
        down = tuple(range(ranks))
        up = down[::-1]
        return cls(sum((up if turn % 2 else down for turn in range(stages_per_rank)), ()))

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return max(self.rank_of_stage) + 1

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of_stage)

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages on one rank, in rising order."""
        return tuple(s for s, holder in enumerate(self.rank_of_stage) if holder == rank)

    @property
    def style(self) -> str:
        """ "loop" (one stage per rank), "interleaved" (round and round), "v" or "free"."""
        ranks, per_rank = self.num_ranks, -(-self.num_stages // self.num_ranks)
        if self == Placement.loop(ranks, per_rank):
            return "loop" if per_rank == 1 else "interleaved"
        return "v" if self == Placement.v(ranks, per_rank) else "free"
