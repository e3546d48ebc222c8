"""The weights of a loss's parts in one step: by labels, by elements, by one, or by rows."""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from penstock.errors import BatchError
from penstock.loss.calls import (
    HINTED_IGNORE_INDEX,
    Elementwise,
    Labelled,
    LossCall,
    Mean,
)
from penstock.loss.form import LossForm
from penstock.loss.labels import BatchLabels, Relation, Source, fetch_numbers
from penstock.loss.memory import Reading, Term
from penstock.loss.reduction import round_weights, share_counts, weigh_rows

__all__ = ["ADVICE", "Given", "TermWeights", "is_close", "read_call", "uneven_error"]

# The allowed relative difference between sums of class weights; less where they are doubles.
_ACCURACY, _DOUBLE_ACCURACY = 1e-4, 1e-10
# The argument of a source whose labels are on another rank.
_REMOTE = "labels on another rank"
ADVICE = (
    "say what it is with Pipeline(reduction=...): 'mean' for a mean over rows, 'sum' for losses "
    "that add up, or a function of one microbatch's target or labels that counts what the loss is "
    "a mean over, such as lambda labels: (labels != -100).sum()"
)


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a step, as far as the weights of its losses depend on them.

    `remote_counts` has the counts of labels that only another rank has, by their relation to the
    target. `doubt` says why the loss may not be a mean over rows. `adds_up` says that the model
    was given the count of the whole batch, so that its losses are parts of a sum; `items` is that
    count, if this rank has it. `makes_own` says that the model computes its loss itself.
    """

    rows: Sequence[int]
    labels: BatchLabels
    remote_counts: Mapping[Relation, Sequence[float]] | None
    doubt: str | None
    adds_up: bool
    makes_own: bool
    is_training: bool
    names: Hashable
    items: float | None = None

    def pick(self, microbatches: Sequence[int], targets: Sequence[Any]) -> "Given":
        """Return the arguments of a step with some of the microbatches, and with these targets."""
        remote = self.remote_counts and {
            relation: [counts[i] for i in microbatches]
            for relation, counts in self.remote_counts.items()
        }
        return replace(
            self,
            rows=[self.rows[i] for i in microbatches],
            labels=self.labels.pick(microbatches, targets),
            remote_counts=remote,
            is_training=True,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """What a mean counts in labels, per microbatch."""

    source: Source
    mean: Mean
    counts: Sequence[float]
    weights: list[float]


class _Check(NamedTuple):
    """What a loss counted in a microbatch, and what the labels say; compared after the step."""

    microbatch: int
    expected: float
    found: torch.Tensor | float
    accuracy: float

    @classmethod
    def of(cls, microbatch: int, expected: float, found: torch.Tensor) -> "_Check":
        """Return the check of a count, which is not fetched from a device yet."""
        # Class weights are summed in any order; counts only lose digits.
        eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
        least = _DOUBLE_ACCURACY if found.dtype == torch.float64 else _ACCURACY
        accuracy = 2 * eps if expected.is_integer() else max(least, 16 * eps)
        number = found.item() if found.is_cpu else found.detach()
        return cls(microbatch, expected, number, accuracy)


@dataclass(frozen=True, slots=True, eq=False)
class _First:
    """A term as it was found in its first microbatch.

    If what it counts is known, `given` has the weights that it got so far. Otherwise `seen` has
    the row weights and counts seen with it.
    """

    number: int
    term: Term
    seen: list[tuple[float, float]]
    given: list[float]


class TermWeights:
    """The weights of one step's microbatches, for each part that a loss may have."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._rows: Sequence[float] = weigh_rows(given.rows)
        self._ones: Sequence[float] = [1.0] * len(given.rows)
        self._known: list[_Counted] = []
        self._checks: list[_Check] = []
        self._first: list[_First] = []
        self._weighed: list[int] = []
        self._uneven: tuple[str | None] | None = None
        self._used: dict[int, Sequence[float]] = {}  # by identity, since comparing takes long

    def _note(self, weights: Sequence[float]) -> None:
        self._used[id(weights)] = weights

    def find_used(self) -> set[tuple[float, ...]]:
        """Return the weights of all microbatches, for each part of the losses so far."""
        return set(map(round_weights, self._used.values()))

    def is_even(self, weights: Sequence[float]) -> bool:
        """Whether these weights of all microbatches are their shares of the rows."""
        return all(map(is_close, weights, self._rows))

    def by_rows(self, microbatch: int) -> float:
        """Return the weight by rows, or raise if arguments do not agree on the rows."""
        if self._given.doubt is not None:
            raise BatchError(
                "all arguments must agree on the rows of the microbatches if the loss is a mean "
                f"over rows ({self._given.doubt}); {ADVICE}"
            )
        self._note(self._rows)
        return self._rows[microbatch]

    def find_uneven(self) -> str | None:
        """Find labels that are spread unevenly over the rows."""
        if self._uneven is None:
            self._uneven = (self._given.labels.find_uneven(),)
        return self._uneven[0]

    def of_all(self, term: Term) -> Sequence[float] | None:
        """Return the weights of a term in all microbatches, if what it counts is known."""
        if term.reading == "sum":
            return self._ones
        if term.reading == "rest":
            return self._rows
        if term.source is None:
            return None
        counted = self._find_counted(term.source, term.mean)
        return None if counted is None else counted.weights

    def _find_counted(self, source: Source, mean: Mean) -> "_Counted | None":
        for known in self._known:
            is_same = known.source is source and known.mean is mean
            if is_same or (known.source == source and known.mean.is_like(mean)):
                return known
        counts = self._count(source, mean)
        if counts is None:
            return None
        self._known.append(_Counted(source, mean, counts, share_counts(counts)))
        return self._known[-1]

    def expect(self, term: Term, found: Mapping[int, torch.Tensor | float]) -> None:
        """Check what losses counted, by microbatch: now, or in `check` if it is on a device."""
        if term.source is None or term.reading != "mean":
            return
        counted = self._find_counted(term.source, term.mean)
        if counted is None:
            return
        for microbatch, number in found.items():
            expected = counted.counts[microbatch]
            if isinstance(number, torch.Tensor):
                self._checks.append(_Check.of(microbatch, expected, number))
            elif number != expected:
                _require_equal(microbatch, expected, number, 0.0)

    def begin_microbatch(self, microbatch: int) -> None:
        """Note that a microbatch has its loss on this rank."""
        self._weighed.append(microbatch)

    def check(self) -> None:
        """Raise if the losses of a step counted something else than its labels."""
        if any(first.seen and len(first.seen) < len(self._weighed) for first in self._first):
            raise BatchError(
                "a part of the loss that only some microbatches have must count labels that are "
                f"an argument of the step (got others); {ADVICE}"
            )
        if not all(map(self._is_complete, self._first)):
            raise BatchError(
                "each part of a loss must count alike in all microbatches (got one that counts "
                f"other labels, or has other class weights, in some of them); {ADVICE}"
            )
        actual = fetch_numbers([check.found for check in self._checks])
        for check, number in zip(self._checks, actual, strict=True):
            _require_equal(check.microbatch, check.expected, number, check.accuracy)

    def _is_complete(self, first: "_First") -> bool:
        """Whether a term got its weights in all microbatches in which it counts."""
        weights = self.of_all(first.term)
        if weights is None or first.term.reading == "rest":
            return True
        expected = math.fsum(weights[microbatch] for microbatch in self._weighed)
        return math.isclose(math.fsum(first.given), expected, rel_tol=1e-9)

    def of_one(self, number: int, term: Term, call: LossCall, microbatch: int) -> float:
        """Return the weight of a term in a microbatch; `number` is that among similar terms.

        What it counts is found in its first microbatch, and checked in the others.
        """
        first = self._find_first(number, term, call)
        weights = self.of_all(first.term)
        if weights is not None:
            self.expect(first.term, {microbatch: call.mean.count(call.target)})
            first.given.append(weights[microbatch])
            self._note(weights)
            return weights[microbatch]
        self._note(self._rows)
        first.seen.append((self._rows[microbatch], call.count()))
        self._require_steady(first)
        return self._rows[microbatch]

    def repeat(self, term: Term, weight: float) -> None:
        """Note the weight of a term that was not observed again."""
        self._note(self.of_all(term) or self._rows)
        for first in self._first:
            if first.term.source == term.source and first.term.mean.is_like(term.mean):
                first.given.append(weight)
                return
        self._first.append(_First(-1, term, [], [weight]))

    def _find_first(self, number: int, term: Term, call: LossCall) -> "_First":
        for first in self._first:
            if first.number == number and first.term.is_like(call):
                return first
        self._first.append(_First(number, term, [], []))
        return self._first[-1]

    def _require_steady(self, first: "_First") -> None:
        """Raise unless unknown counts are proportional to rows, which then replace them."""
        (first_row, first_count), (row, count) = first.seen[0], first.seen[-1]
        # A constant count need not depend on the microbatches, as in a norm of weights.
        is_constant = isinstance(first.term.mean, Elementwise) and count == first_count
        if not is_constant and not is_close(count * first_row, first_count * row):
            raise BatchError(
                "what the loss counts must be known of all microbatches before the first "
                f"backward (got {first_count:g} for {first_row:.3g} of the rows, then {count:g} "
                f"for {row:.3g}, of labels that the rank with the last stage was not given as an "
                f"argument); pass the labels there too, or {ADVICE}"
            )

    def find_source(
        self, call: LossCall, microbatch: int, known: Source | None, taken: Collection[Source]
    ) -> Source | None:
        """Find the labels that a call's target derives from, on this rank or by remote counts.

        Several may have the same values in this microbatch. Then the source that is known from
        another microbatch is chosen, else one that no other call has taken.
        """
        found: list[Source] = []
        # No further than needed: the last ones are found by sorting, which can take longer than
        # all of the step.
        for source in self._given.labels.find(call, microbatch):
            if source == known or (known is None and source not in taken):
                return source
            found.append(source)
        if found:
            return next((source for source in found if source not in taken), found[0])
        match call.mean:
            case Labelled(ignore_index=ignored, class_weights=None) if (
                ignored == HINTED_IGNORE_INDEX and self._given.remote_counts is not None
            ):
                return self._find_remote(self._given.remote_counts, call.count(), microbatch)
            case _:
                return None

    def _find_remote(
        self, counts: Mapping[Relation, Sequence[float]], count: float, microbatch: int
    ) -> Source | None:
        fitting = [relation for relation in counts if counts[relation][microbatch] == count]
        if len({tuple(counts[relation]) for relation in fitting}) != 1:
            return None
        return Source(_REMOTE, "", fitting[0])

    def _count(self, source: Source, mean: Mean) -> Sequence[float] | None:
        if source.argument != _REMOTE:
            return self._given.labels.count(source, mean)
        remote = self._given.remote_counts
        return None if remote is None else remote[source.relation]


def read_call(call: LossCall, form: LossForm, loss: torch.Tensor, *, adds_up: bool) -> Reading:
    """Return the role of a call; a sum that is divided by what counts is a mean."""
    if call.reduction == "mean":
        return "mean"
    is_alone = len(form.used) == 1 and not form.has_rest and form.is_linear
    is_labelled = isinstance(call.mean, Labelled)
    if call.reduction == "sum" and is_alone and not form.is_scaled:
        return "sum"
    if call.reduction == "sum" and is_labelled and adds_up:
        return "sum"
    if is_alone and is_labelled and call.is_divided(loss):
        return "mean"
    if call.reduction == "sum":
        raise BatchError(
            "a loss of several parts must be made of means (got one that is a sum, which may or "
            f"may not be divided by what it is a mean over); {ADVICE}"
        )
    return "rest"


def uneven_error(labels: str) -> BatchError:
    """Return the error for a loss that may be a mean over unevenly spread labels."""
    return BatchError(
        "what the loss is a mean over must be known where microbatches differ in how much of "
        f"their labels counts (got uneven labels in {labels}, and a loss that does not show "
        f"whether it counts them); {ADVICE}"
    )


def _require_equal(microbatch: int, expected: float, found: float, accuracy: float) -> None:
    if not math.isclose(found, expected, rel_tol=accuracy):
        raise BatchError(
            f"the loss of microbatch {microbatch} must count what the labels of the step say (got "
            f"{found:g} instead of {expected:g}, since the model or the loss function changes "
            f"them); {ADVICE}"
        )


def is_close(one: float, other: float) -> bool:
    """Whether two weights are equal up to rounding."""
    return math.isclose(one, other, rel_tol=1e-12)
