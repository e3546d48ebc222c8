"""What a pipeline has learned about how its loss is computed, from one step to the next."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from penstock.loss.calls import LossCall, Mean
from penstock.loss.form import COUNTING, LossForm, find_form, find_shares
from penstock.loss.labels import Source

__all__ = ["KnownForm", "LossMemory", "LossPattern", "Reading", "Term"]

# The role of a call in the loss: a mean over what it counts, a sum, or neither.
Reading: TypeAlias = Literal["mean", "sum", "rest"]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A call that is part of the loss: its role, what it counts, and in which labels."""

    reduction: str
    reading: Reading
    mean: Mean
    source: Source | None

    @property
    def is_counted(self) -> bool:
        """Whether what it counts is known in every microbatch, and checked."""
        return self.reading == "sum" or (self.reading == "mean" and self.source is not None)

    def is_like(self, call: LossCall) -> bool:
        """Whether a call may be the same one in another microbatch."""
        return self.reduction == call.reduction and self.mean.is_like(call.mean)


# How many ways to compute the loss are kept for one kind of step; the oldest are dropped.
_MOST_WAYS = 8


@dataclass(slots=True, eq=False)
class LossPattern:
    """How the loss of one kind of step is computed.

    `is_left` says that it need not be observed in every step: it is the result of the call
    `single`, or of no call that counts anything. `top` is its last operation, and `signatures` are
    the last operations of its graphs. `is_counted` says that what each part counts is known.
    `is_tried` says that some step could have shown a wrong weight, and was compared with its whole
    batch if possible. `is_confirmed` says that labels were spread unevenly in such a batch.
    """

    steps: int = 0
    is_left: bool = False
    is_opaque: bool = False
    is_mixed: bool = True
    single: Term | None = None
    top: str = ""
    terms: tuple[Term, ...] = ()
    signatures: set[str] = field(default_factory=set)
    is_counted: bool = False
    is_tried: bool = False
    is_confirmed: bool = False

    @property
    def is_observed(self) -> bool:
        """Whether this step observes how the loss is computed: in steps 1, 2, 4, 8 and so on."""
        return not self.is_left or (self.is_due and not self.is_opaque)

    @property
    def is_due(self) -> bool:
        """Whether this step looks again at what is known."""
        return self.steps & (self.steps - 1) == 0

    def learn(
        self,
        used: Sequence[LossCall],
        terms: Sequence[Term | None],
        form: LossForm,
        *,
        top: str,
        signature: str,
        is_training: bool,
    ) -> None:
        """Keep what a loss was seen to consist of; a loss of one known call is not observed again.

        Nothing is learned from a microbatch in which one of the calls counts nothing.
        """
        known = tuple(term for term in terms if term is not None)
        if len(known) < len(terms):
            return
        self.terms, self.top = known, top
        self.single = known[0] if known else None
        self.is_mixed = len(known) + form.has_rest > 1
        self.is_counted = (
            not form.has_rest and form.is_linear and all(term.is_counted for term in known)
        )
        if signature:
            self.signatures.add(signature)
        # Only a graph shows, without observing, that a loss is computed in another way.
        is_visible = is_training or self.is_opaque
        is_simple = form.is_linear and not self.is_mixed and is_visible
        self.is_left = is_simple and (
            not known or self._can_be_left(used[0], known[0], is_training=is_training)
        )

    def _can_be_left(self, call: LossCall, term: Term, *, is_training: bool) -> bool:
        """Whether enough is known about a loss that is one call to stop observing it."""
        if term.reading != "mean":
            return term.reduction == "sum" and term.reading == "sum"
        is_checked = is_training and self.top in COUNTING and not call.is_hooked
        return term.source is not None and (is_checked or self.is_opaque)

    def forget(self) -> None:
        """Observe the loss again from now on."""
        self.is_left, self.single, self.terms = False, None, ()


@dataclass(frozen=True, slots=True)
class KnownForm:
    """The form of a loss as seen in training, and the factor of each of its calls.

    `items` is the count that the model was given for the whole batch, if it was.
    """

    num_calls: int
    form: LossForm
    factors: tuple[float, ...] = ()
    has_trained_factor: bool = False
    items: float | None = None


@dataclass(slots=True)
class LossMemory:
    """The patterns of a pipeline, and the forms of its losses, by the arguments of a step."""

    patterns: dict[Hashable, list[LossPattern]] = field(default_factory=dict)
    forms: dict[Hashable, KnownForm] = field(default_factory=dict)
    # The argument whose count a model divides its loss by.
    divided: dict[Hashable, str] = field(default_factory=dict)
    has_warned: bool = False

    def is_unknown(self, names: Hashable) -> bool:
        """Whether only a graph shows what such a loss consists of, and by which factors."""
        form = None if names not in self.forms else self.forms[names].form
        is_sum = form is not None and bool(form.used) and len(form.used) + form.has_rest > 1
        return form is None or is_sum or names in self.divided

    def begin_step(self, key: Hashable) -> LossPattern:
        """Return how the loss of such a step was computed last, or a new pattern."""
        pattern = self.patterns.setdefault(key, [LossPattern()])[-1]
        pattern.steps += 1
        return pattern

    def switch(self, key: Hashable, signature: str) -> LossPattern:
        """Return the pattern of a loss whose graph differs from the step before."""
        patterns = self.patterns[key]
        known = [pattern for pattern in patterns if signature in pattern.signatures]
        pattern = known[-1] if known else LossPattern()
        pattern.steps += 1
        others = [other for other in patterns if other is not pattern]
        self.patterns[key] = [*others[-_MOST_WAYS:], pattern]
        return pattern

    def find_form(
        self,
        names: Hashable,
        loss: torch.Tensor,
        calls: Sequence[LossCall],
        items: float | None = None,
    ) -> LossForm:
        """Find which calls a loss consists of: by its graph, or by its value and past training.

        `names` are the arguments of the step. `items` is the count that the model was given.
        """
        known = self.forms.get(names)
        if loss.requires_grad:
            form = find_form(loss, [call.edge for call in calls])
            if not form.is_linear and all(calls[n].reduction == "none" for n in form.used):
                # A function of unreduced results, such as a focal loss, belongs to the rest.
                form = LossForm((), has_rest=True, is_linear=True, is_scaled=True)
            if items and all(calls[n].reduction == "none" for n in form.used):
                form = _find_hidden_sums(loss, items) or form
            if known is None or known.form != form or known.num_calls != len(calls):
                self.forms[names] = KnownForm(len(calls), form)
            return form
        # Without a graph, a loss that is the result of one call is recognised by its value.
        same = [number for number, call in enumerate(calls) if call.is_value(loss)]
        is_mean = bool(same) and calls[same[-1]].reduction == "mean"
        if known is not None and known.num_calls == len(calls) and not is_mean:
            return known.form
        if same:
            return LossForm((same[-1],), has_rest=False, is_linear=True, is_scaled=False)
        shares = [n for n, call in enumerate(calls) if items and call.is_share(loss, items)]
        if shares:
            return LossForm((shares[-1],), has_rest=False, is_linear=True, is_scaled=True)
        used = tuple(number for number, call in enumerate(calls) if call.value.numel() == 1)
        return LossForm(used, has_rest=True, is_linear=True, is_scaled=True)


def _find_hidden_sums(loss: torch.Tensor, items: float) -> LossForm | None:
    """Find sums, divided by the items of the batch, that none of torch's losses has made."""
    shares = find_shares(loss, items)
    if True not in shares:
        return None
    return LossForm((), has_rest=False, is_linear=len(shares) == 1, is_scaled=True)
