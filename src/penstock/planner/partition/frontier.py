"""The frontier of a search: its states in columns."""

from dataclasses import dataclass, replace

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.partition.chain import Longs

__all__ = ["Frontier"]


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """Per state: places of cuts, the goal's value, ticks and bytes of the rank at hand.

    `spread` is the sum of the squares of the stages so far, `parent` the number of the state that
    it was before the current step.
    """

    cuts: dict[int, Longs]
    value: Longs
    ticks: Longs
    bytes: Longs
    spread: Floats
    parent: Longs

    @classmethod
    def single(cls, num_stages: int, num_pieces: int, value: int) -> "Frontier":
        """Return the one state before the first step, which knows the two ends of the chain."""
        zero = np.zeros(1, dtype=np.int64)
        cuts = {0: zero, num_stages: zero + num_pieces}
        return cls(cuts, zero + value, zero, zero, np.zeros(1), zero)

    def __len__(self) -> int:
        return len(self.value)

    def take(self, index: Longs) -> "Frontier":
        """Return some of the states, each as often as it is named."""
        return Frontier(
            cuts={cut: places[index] for cut, places in self.cuts.items()},
            value=self.value[index],
            ticks=self.ticks[index],
            bytes=self.bytes[index],
            spread=self.spread[index],
            parent=self.parent[index],
        )

    def with_cut(self, cut: int, places: Longs) -> "Frontier":
        """Return the states with one more cut."""
        return replace(self, cuts={**self.cuts, cut: places})

    def numbered(self) -> "Frontier":
        """Return the states as parents of the next ones."""
        return replace(self, parent=np.arange(len(self)))

    def without_rank(self, cuts: tuple[int, ...]) -> "Frontier":
        """Return the states between two ranks, with no more than these cuts."""
        zero = np.zeros(len(self), dtype=np.int64)
        return replace(self, cuts={c: self.cuts[c] for c in cuts}, ticks=zero, bytes=zero)

    def best_of_equals(self, cuts: tuple[int, ...]) -> Longs:
        """Return, of the states that agree on these cuts, the one with the least value each."""
        keys = [self.cuts[cut] for cut in cuts]
        order = np.lexsort((self.value, *keys))
        is_first = np.zeros(len(order), dtype=np.bool_)
        is_first[:1] = True
        for key in keys:
            is_first[1:] |= key[order[1:]] != key[order[:-1]]
        return order[is_first]
