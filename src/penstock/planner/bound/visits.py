"""What the visits of a microbatch cost each rank, in seconds and bytes.

A placement in rounds leads every microbatch past each rank once per round, down to the last stage
and back. So a rank has `2 * rounds` visits of each microbatch, always in this order:

visit        0    1    2    3          two rounds: F of the rank's first stage, F of its second,
action      F0   F1   I1   I0          I of its second, I of its first; each W any time after its I
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.ir.rows import Floats

__all__ = ["Longs", "Visits", "share"]

Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Visits:
    """Seconds and bytes with a row per round and a column per rank; capacity per rank."""

    microbatches: int
    forward: Floats
    backward: Floats
    weight: Floats
    activation: Floats
    stash: Floats
    capacity: Floats

    @property
    def rounds(self) -> int:
        """The number of stages of each rank."""
        return len(self.forward)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.capacity)

    def backward_visit(self, turn: int) -> int:
        """Return which visit is the I of a round."""
        return 2 * self.rounds - 1 - turn

    @cached_property
    def seconds(self) -> Floats:
        """Per visit and rank, how long it takes."""
        return np.concatenate((self.forward, self.backward[::-1]))

    @cached_property
    def whole(self) -> Floats:
        """Per rank, all the work for one microbatch."""
        total: Floats = (self.forward + self.backward + self.weight).sum(axis=0)
        return total

    @cached_property
    def most_done(self) -> Floats:
        """Per visit, rank and microbatch, the most work behind the rank when it begins it.

        Microbatches come in order: all before this one may be done, and of the others no more
        than fits into the capacity at once, and of each no more than what comes before the visit.
        """
        number = np.arange(self.microbatches)
        done = number * self.whole[None, :, None]
        each = self._most_of_one[:, :, None] * (self.microbatches - number)
        return done + np.minimum(self._most_under_way[:, :, None], each)

    @cached_property
    def most_held(self) -> Floats:
        """Per rank, the most microbatches between their first F and their last I."""
        return np.floor(share(self.capacity, self.activation[0], np.inf))

    @cached_property
    def most_held_beside_one(self) -> Floats:
        """Per rank, the same while one of them holds all that it ever does, not rounded."""
        others = self.activation[1:].sum(axis=0)
        return share(np.maximum(self.capacity - others, 0.0), self.activation[0], np.inf)

    @cached_property
    def weight_rate(self) -> Floats:
        """Per rank, the least seconds of W for each byte that they give back."""
        rate = share(self.weight, self.stash, np.inf).min(axis=0)
        return np.where(np.isinf(rate), 0.0, rate)

    @property
    def most_of_unfinished(self) -> Floats:
        """Per rank, the most work for a microbatch before its last I."""
        most: Floats = self._most_of_one[-1]
        return most

    @cached_property
    def _most_of_one(self) -> Floats:
        """Per visit and rank, the most work for a microbatch that has not begun this visit."""
        return self._phases[1][:-1]

    @cached_property
    def _most_under_way(self) -> Floats:
        """Per visit and rank, the most work for unfinished microbatches when one begins it.

        That one has all before the visit behind it and holds its bytes. The others have not
        begun it either; each byte left to them buys at most the best rate of work per byte.
        """
        held, work = self._phases
        rate = np.where(work > 0, share(work, held, np.inf), 0.0)
        rate = np.maximum.accumulate(rate)[:-1]
        is_free = np.isinf(rate)
        left = np.maximum(self._capacity_in_pieces - held[:-1], 0.0)
        return work[:-1] + np.where(is_free, np.inf, left * np.where(is_free, 0.0, rate))

    @property
    def _capacity_in_pieces(self) -> Floats:
        """Per rank, its capacity less what is too small for a piece, if all are equal."""
        piece = self.activation[0]
        is_even = (self.activation == piece).all(axis=0) & (piece > 0)
        return np.where(is_even, np.floor(share(self.capacity, piece, 0.0)) * piece, self.capacity)

    @cached_property
    def _phases(self) -> tuple[Floats, Floats]:
        """Per number of visits behind a microbatch and rank: bytes held, most work done."""
        taken = np.concatenate((self.activation, -self.activation[::-1]))
        done = np.concatenate((self.forward, (self.backward + self.weight)[::-1]))
        nothing = np.zeros((1, self.ranks))
        held = np.concatenate((nothing, np.cumsum(taken, axis=0)))
        return np.maximum(held, 0.0), np.concatenate((nothing, np.cumsum(done, axis=0)))

    def take(self, ranks: Longs) -> "Visits":
        """Return the same for some of the ranks."""
        return Visits(
            self.microbatches,
            forward=self.forward[:, ranks],
            backward=self.backward[:, ranks],
            weight=self.weight[:, ranks],
            activation=self.activation[:, ranks],
            stash=self.stash[:, ranks],
            capacity=self.capacity[ranks],
        )


def share(amount: Floats, of: Floats, otherwise: float) -> Floats:
    """Return `amount / of`, or `otherwise` where `of` is 0."""
    quotient = np.full(np.broadcast_shapes(np.shape(amount), np.shape(of)), otherwise)
    np.divide(amount, of, out=quotient, where=of > 0)
    return quotient
