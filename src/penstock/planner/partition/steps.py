"""The order in which a search makes the cuts: rank after rank, stage after stage.

It is the same for every state of a search, so it is computed once.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from penstock.ir.placement import Placement

__all__ = ["Ahead", "CutSequence", "CutStep", "Gap", "NewCut", "sequence_cuts"]

# The stages from one cut that is made up to the next one.
Gap = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is left to do: gaps to fill, and ranks that still take pieces.

    If the first of the ranks is half done, its `later_stages` are still to come.
    """

    gaps: tuple[Gap, ...]
    ranks: tuple[int, ...]
    later_stages: tuple[int, ...] = ()

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cuts around the gaps: all that the future depends on."""
        return tuple(sorted({cut for gap in self.gaps for cut in gap}))


@dataclass(frozen=True, slots=True)
class NewCut:
    """A cut to make, and the nearest cuts before and after it that are made already."""

    cut: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class CutStep:
    """Give one stage its pieces, by making the cuts around it that are not made yet."""

    rank: int
    stage: int
    new_cuts: tuple[NewCut, ...]
    ahead: Ahead

    @property
    def is_last_of_rank(self) -> bool:
        """Whether its rank is complete after it."""
        return not self.ahead.later_stages


@dataclass(frozen=True, slots=True)
class CutSequence:
    """The steps of a search over all stages, and what is ahead before the first."""

    ahead: Ahead
    steps: tuple[CutStep, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the order in which they are taken."""
        return self.ahead.ranks

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """All gaps that exist at some time."""
        later = (gap for step in self.steps for gap in step.ahead.gaps)
        return tuple(sorted({*self.ahead.gaps, *later}))


def sequence_cuts(placement: Placement, weight: Sequence[int]) -> CutSequence:
    """Return the steps from the first rank to the last or back, beginning at the heavier end.

    The tightest rank is cut first, so that dead ends are found early.
    """
    ranks = tuple(range(placement.num_ranks))
    if weight[-1] > weight[0]:
        ranks = ranks[::-1]
    return CutSequence(Ahead(((0, placement.num_stages),), ranks), tuple(_walk(placement, ranks)))


def _walk(placement: Placement, order: tuple[int, ...]) -> Iterator[CutStep]:
    made = {0, placement.num_stages}
    filled: set[int] = set()
    for number, rank in enumerate(order):
        stages = placement.stages(rank)
        for place, stage in enumerate(stages):
            new_cuts = tuple(_make(made, stage))
            filled.add(stage)
            later = stages[place + 1 :]
            ranks = order[number:] if later else order[number + 1 :]
            yield CutStep(rank, stage, new_cuts, Ahead(tuple(_gaps(made, filled)), ranks, later))


def _make(made: set[int], stage: int) -> Iterator[NewCut]:
    for cut in (stage, stage + 1):
        if cut not in made:
            before, after = max(c for c in made if c < cut), min(c for c in made if c > cut)
            yield NewCut(cut, before, after)
            made.add(cut)


def _gaps(made: Set[int], filled: Set[int]) -> Iterator[Gap]:
    for begin, end in pairwise(sorted(made)):
        if begin not in filled:
            yield begin, end
