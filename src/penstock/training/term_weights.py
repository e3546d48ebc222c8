"""What the parts of a loss count for in one step: by labels, by elements, by one, or by rows."""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.errors import BatchError
from penstock.training.labels import Labels, Relation, Source, fetch_numbers
from penstock.training.loss_calls import (
    HINTED_IGNORE_INDEX,
    Elementwise,
    Labelled,
    LossCall,
    Mean,
)
from penstock.training.loss_memory import Term
from penstock.training.weights import share_counts, weigh_rows

__all__ = ["ADVICE", "Given", "TermWeights", "is_close"]

# The argument that a source has whose labels are on another rank, which has sent their counts.
_TOLD = "labels on another rank"
ADVICE = (
    "say what it is with Pipeline(reduction=...): 'mean' for a mean over rows, 'sum' for losses "
    "that add up, or a function of one microbatch's target or labels that counts what the loss is "
    "a mean over, such as lambda labels: (labels != -100).sum()"
)


@dataclass(frozen=True, slots=True)
class Given:
    """What a step was given, as far as the weights of its losses depend on it.

    `told` has the counts of labels that only another rank has, by how they become a target;
    `doubt` says why rows may not be what the loss is a mean over; `adds_up` says that the model
    was given the count of the whole batch, so that its losses are parts of a sum; `makes_own` says
    that the model makes its loss itself.
    """

    rows: Sequence[int]
    labels: Labels
    told: Mapping[Relation, Sequence[float]] | None
    doubt: str | None
    adds_up: bool
    makes_own: bool
    is_training: bool
    names: Hashable


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """What a mean counts in labels, microbatch by microbatch."""

    source: Source
    mean: Mean
    counts: Sequence[float]
    weights: list[float]


class TermWeights:
    """The weights of one step's microbatches, for each part that a loss may have."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._rows = weigh_rows(given.rows)
        self._known: list[_Counted] = []
        self._checks: list[tuple[int, float, torch.Tensor]] = []
        self._first: dict[int, tuple[float, float]] = {}
        self._has_looked = False

    @property
    def num_microbatches(self) -> int:
        """How many microbatches the step has."""
        return len(self._rows)

    def is_even(self, weights: Sequence[float]) -> bool:
        """Whether these weights of all microbatches are those of their rows."""
        return all(map(is_close, weights, self._rows))

    def by_rows(self, microbatch: int, *, is_known: bool) -> float:
        """Weigh by rows, unless something says that the loss is not a mean over them.

        `is_known` says that the rest of the loss explains any labels that do not count.
        """
        if self._given.doubt is not None:
            raise BatchError(f"what the loss is a mean over is not known: {self._given.doubt}; {ADVICE}")
        if not is_known and not self._has_looked:
            self._has_looked = True
            uneven = self._given.labels.find_uneven()
            if uneven is not None:
                raise BatchError(
                    f"what the loss is a mean over is not known, and what counts in {uneven} is "
                    f"not spread evenly over the microbatches; {ADVICE}"
                )
        return self._rows[microbatch]

    def of_all(self, term: Term) -> list[float] | None:
        """Weigh a term in all microbatches, if it is known what it counts in them."""
        if term.reading == "sum":
            return [1.0] * len(self._rows)
        if term.reading == "rest":
            return self._rows
        if term.source is None:
            return None
        counted = self._find_counted(term.source, term.mean)
        return None if counted is None else counted.weights

    def _find_counted(self, source: Source, mean: Mean) -> "_Counted | None":
        for known in self._known:
            if known.source == source and known.mean.is_like(mean):
                return known
        counts = self._count(source, mean)
        if counts is None:
            return None
        self._known.append(_Counted(source, mean, counts, share_counts(counts)))
        return self._known[-1]

    def expect(self, term: Term, microbatch: int, found: torch.Tensor | float) -> None:
        """Note what a loss has really counted, to be compared when the step is over."""
        counted = None if term.source is None else self._find_counted(term.source, term.mean)
        if counted is not None and term.reading == "mean":
            actual = found if isinstance(found, torch.Tensor) else torch.tensor(found)
            self._checks.append((microbatch, counted.counts[microbatch], actual.detach()))

    def check(self) -> None:
        """Refuse a step whose losses have counted something else than its labels said."""
        if not self._checks:
            return
        actual = fetch_numbers([found for _, _, found in self._checks])
        for (microbatch, expected, found), number in zip(self._checks, actual, strict=True):
            accuracy = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
            if not math.isclose(number, expected, rel_tol=2 * accuracy):
                raise BatchError(
                    f"the loss of microbatch {microbatch} must count what the labels of the step "
                    f"say (got {number:g} instead of {expected:g}), but the model or the loss "
                    f"function makes something else of them; {ADVICE}"
                )

    def of_one(self, number: int, term: Term, call: LossCall, microbatch: int) -> float:
        """Weigh a term, the so numbered one of its loss, in a microbatch."""
        weights = self.of_all(term)
        if weights is not None:
            self.expect(term, microbatch, call.mean.count(call.target))
            return weights[microbatch]
        row, count = self._rows[microbatch], call.count()
        first_row, first_count = self._first.setdefault(number, (row, count))
        # What is the same for every microbatch need not depend on the batch: say, a norm of weights.
        is_constant = isinstance(call.mean, Elementwise) and count == first_count
        if not is_constant and not is_close(count * first_row, first_count * row):
            raise BatchError(
                "what the loss counts must be known of all microbatches before the first "
                "backward, but differs between them and is not read off an argument that the rank "
                f"with the last stage was given; pass the labels there too, or {ADVICE}"
            )
        return row

    def find_source(
        self, call: LossCall, microbatch: int, known: Source | None, taken: Collection[Source]
    ) -> Source | None:
        """Find the labels that a call's target was made of: values here, or counts from afar.

        Several may have the same values in this microbatch. Then it is the one that is known from
        another, else one that is not taken by another call.
        """
        found = list(self._given.labels.find(call, microbatch))
        if known in found:
            return known
        if found:
            return next((source for source in found if source not in taken), found[0])
        match call.mean:
            case Labelled(ignore_index=ignored, class_weights=None) if (
                ignored == HINTED_IGNORE_INDEX and self._given.told is not None
            ):
                return self._find_told(self._given.told, call.count(), microbatch)
            case _:
                return None

    def _find_told(
        self, told: Mapping[Relation, Sequence[float]], count: float, microbatch: int
    ) -> Source | None:
        fitting = [relation for relation in told if told[relation][microbatch] == count]
        if len({tuple(told[relation]) for relation in fitting}) != 1:
            return None
        return Source(_TOLD, "", fitting[0])

    def _count(self, source: Source, mean: Mean) -> Sequence[float] | None:
        if source.argument != _TOLD:
            return self._given.labels.count(source, mean)
        return None if self._given.told is None else self._given.told[source.relation]


def is_close(one: float, other: float) -> bool:
    """Whether two weights differ by no more than their rounding."""
    return math.isclose(one, other, rel_tol=1e-12)
