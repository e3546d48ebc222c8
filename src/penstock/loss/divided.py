"""Losses that a model divides by a count of its own, such as that of masked patches.

    loss of a microbatch   =  sum(error * mask) / mask.sum()
    its part of the batch  =  the same, times mask.sum() here / mask.sum()

None of torch's losses has made the count, but the graph shows it as a divisor. What it counts must
be known before the first backward: it is found among the arguments of the step, as the one whose
count the divisor is a multiple of, and every microbatch is checked.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch.autograd.graph import Node

from penstock.errors import BatchError
from penstock.loss.form import Divisor, find_divisors
from penstock.loss.labels import fetch_numbers
from penstock.loss.memory import LossMemory
from penstock.loss.reduction import round_weights, share_counts
from penstock.loss.term_weights import ADVICE, Given

__all__ = ["DividedLoss"]

# How far a divisor may be from a multiple of a count: some models add a small number to it.
_ACCURACY = 1e-4
_SMALL = 1e-3


@dataclass(frozen=True, slots=True)
class _Counted:
    """An argument whose count a loss is divided by, and that count in every microbatch."""

    name: str
    counts: Sequence[float]


class DividedLoss:
    """The divisors of one step's losses, and the weights that follow from them."""

    def __init__(self, memory: LossMemory, given: Given) -> None:
        self._memory, self._given = memory, given
        self._found: dict[int, list[torch.Tensor | float]] = {}
        self._counted: _Counted | None = None
        self._accuracy = _ACCURACY

    def weigh(
        self, microbatch: int, loss: torch.Tensor, seen: Collection[Node | None]
    ) -> float | None:
        """Return the weight of a loss that is divided by a count; None if it is by rows.

        `seen` are the quotients, of those that were observed, whose divisor is a tensor.
        """
        if not self._given.makes_own:
            return None
        divisors, is_all = find_divisors(loss, self._given.rows[microbatch])
        divided, names = self._memory.divided, self._given.names
        # Whoever counts in the type of the loss rounds the count.
        if loss.is_floating_point():
            self._accuracy = max(_ACCURACY, torch.finfo(loss.dtype).eps)
        for divisor in divisors:
            # What an evaluation receives may have gradients that it has not in training.
            is_plain = not (divisor.is_trained and self._given.is_training)
            if divisor.is_chosen or not divisor.quotients.isdisjoint(seen):
                divided.setdefault(names, "")
            if is_all and not self._found and names in divided and is_plain:
                self._counted = self._find_counted(microbatch, divisor)
                divided[names] = "" if self._counted is None else self._counted.name
        self._found[microbatch] = [divisor.value for divisor in divisors]
        return None if self._counted is None else share_counts(self._counted.counts)[microbatch]

    @property
    def is_found(self) -> bool:
        """Whether it was found what the losses are divided by."""
        return self._counted is not None

    def find_used(self) -> set[tuple[float, ...]]:
        """Return the weights of all microbatches, if these are not by rows."""
        if self._counted is None:
            return set()
        return {round_weights(share_counts(self._counted.counts))}

    def check(self) -> None:
        """Raise unless the divisors are what the weights have been made of."""
        for term in zip_longest(*self._found.values(), fillvalue=0.0):
            self._require_alike(dict(zip(self._found, fetch_numbers(term), strict=True)))

    def _require_alike(self, numbers: dict[int, float]) -> None:
        if self._counted is not None:
            is_right = _are_alike(numbers, self._counted.counts, self._accuracy)
        else:
            is_right = _are_alike(numbers, [1.0] * len(self._given.rows), self._accuracy)
            is_right |= _are_alike(numbers, self._given.rows, self._accuracy)
        if is_right:
            return
        self._memory.divided[self._given.names] = ""
        shown = ", ".join(f"{numbers[microbatch]:g}" for microbatch in sorted(numbers))
        raise BatchError(
            "what a model divides its loss by must be a number of rows, the same in all "
            "microbatches, or the count of labels or of a mask that the last stage is given too "
            f"(got {shown}); let the model divide by num_items_in_batch, or {ADVICE}"
        )

    def _find_counted(self, microbatch: int, divisor: Divisor) -> _Counted | None:
        """Find what a divisor counts, if that differs between microbatches of one size."""
        known = self._memory.divided[self._given.names]
        found = list(self._find_uneven(known))
        if known:
            return next(iter(found), None)
        # A factor of the loss, such as its weight or sign, need not be a whole number.
        numbers = fetch_numbers([divisor.value, divisor.quotient]) if found else []
        fitting = [
            one
            for one in found
            if any(self._is_multiple(abs(number), one.counts[microbatch]) for number in numbers)
        ]
        return max(fitting, key=lambda one: one.counts[microbatch], default=None)

    def _is_multiple(self, divisor: float, count: float) -> bool:
        """Whether a divisor is a count, or a whole number of times as large."""
        if not count:
            return abs(divisor) < _SMALL
        times = divisor / count
        is_whole = abs(times - round(times)) < self._accuracy * times
        return times > 1 - self._accuracy and is_whole

    def _find_uneven(self, only: str) -> Iterator[_Counted]:
        """Yield what may be counted: labels, and masks of zeros and ones; or one of them."""
        rows = self._given.rows
        for name, counts in self._given.labels.count_all(only):
            if sum(counts) and not _are_alike(dict(enumerate(counts)), rows):
                yield _Counted(name, counts)


def _are_alike(
    numbers: dict[int, float], counts: Sequence[float], accuracy: float = _ACCURACY
) -> bool:
    """Whether numbers of microbatches are their counts, all times the same number.

    A divisor may be small itself; only where nothing is counted it may be just about zero.
    """
    times = max((n / counts[i] for i, n in numbers.items() if counts[i]), default=0.0)
    return all(
        math.isclose(number, times * counts[i], rel_tol=accuracy)
        if counts[i]
        else abs(number) < _SMALL
        for i, number in numbers.items()
    )
