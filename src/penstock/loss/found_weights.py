"""Weights of microbatches, found so that their losses add up to the loss of the unsplit model.

A mean over labels (`cross_entropy`, `nll_loss`) is weighted by the labels that count in each
microbatch, a sum by one, and everything else by rows:

    loss of a microbatch   =  factor * cross_entropy  +  rest
    its part of the batch  =  factor * cross_entropy * labels here / labels
                              +  rest * rows here / rows

The calls are observed while the loss is computed, until it is known to be the result of one call.
From then on it is observed in steps 2, 4, 8 and so on, but its count is checked in every step.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from penstock.errors import BatchError
from penstock.loss.calls import Labelled, LossCall, LossObserver, number_alike, observe_eagerly
from penstock.loss.divided import DividedLoss
from penstock.loss.form import LossForm, name_top, read_count, sign_graph
from penstock.loss.labels import Source
from penstock.loss.memory import LossMemory, Reading, Term
from penstock.loss.rerun import LossMade, versions_of
from penstock.loss.term_weights import ADVICE, Given, TermWeights, is_close, read_call
from penstock.loss.weigher import KnownLoss, Share, make_parts
from penstock.modules.compiled import is_compiled

__all__ = ["FoundWeights"]

# Last operations that do not show how a loss was computed.
_OPAQUE = ("CompiledFunction", "_Replay")


class FoundWeights:
    """The weights of one step's losses.

    A loss is weighted by rows even if its labels are spread unevenly, because the caller compares
    it with the loss of several microbatches together.
    """

    def __init__(self, memory: LossMemory, given: Given) -> None:
        self._memory = memory
        self._given = given
        self._weights = TermWeights(given)
        self._divided = DividedLoss(memory, given)
        # Whether there is one microbatch, whose loss is that of the batch.
        self.is_alone = len(given.rows) == 1
        self._key = (given.names, given.is_training)
        self.pattern = memory.begin_step(self._key)
        self._has_begun = False
        # Whether all losses count nothing so far, and whether each has a call that counts labels.
        self.is_empty = self._is_labelled = True
        self._signature = ""
        self._call: LossMade | None = None
        self._inside: LossObserver | None = None
        self._outside: LossObserver | None = None

    @property
    def needs_graph(self) -> bool:
        """Whether the last stage of an evaluation must show what its loss consists of."""
        is_own = self._given.makes_own and not self._given.is_training and not self.is_alone
        return is_own and self._memory.is_unknown(self._given.names)

    def observe_stage(self, module: nn.Module) -> AbstractContextManager[object] | None:
        """Observe the calls of loss functions in a last stage, unless its loss is known."""
        pattern = self.pattern
        if self.is_alone or not self._given.makes_own or not pattern.is_observed:
            return None
        if not pattern.top:
            pattern.is_opaque = any(map(is_compiled, module.modules()))
        self._inside = LossObserver(is_safe=pattern.is_mixed)
        return observe_eagerly(self._inside)

    def make_loss(
        self,
        function: Callable[..., Any],
        microbatch: int,  # noqa: ARG002  # Weigher's form
        output: Any,
        target: Any,
    ) -> Any:
        """Call the loss function, and observe it unless the loss is computed as before."""
        if self.is_alone:
            return function(output, target)
        versions = versions_of(output, target)
        # If its stage was observed, the loss function is observed too.
        if self.pattern.is_observed or self._inside is not None:
            self._call = LossMade(function, output, target, versions)
            loss = self._observe(self._call)
        else:
            loss = function(output, target)
        return self.settle(LossMade(function, output, target, versions), loss)

    def settle(self, made: LossMade, loss: Any) -> Any:
        """Return a loss that was computed; one that is not computed as before, made again."""
        is_first, self._has_begun = not self._has_begun, True
        if not isinstance(loss, torch.Tensor) or self._is_usual(loss, made.output):
            return loss
        if is_first:
            self.pattern = self._memory.switch(self._key, self._signature)
        if self.pattern.is_observed or not is_first:
            self._call = made
            return self._observe_again(made)
        self._outside = None
        return loss

    def _observe_again(self, call: LossMade) -> Any:
        """Compute a loss once more and observe it, unless its first call had side effects."""
        if not call.can_be_repeated():
            self.pattern.forget()
            raise BatchError(
                "a loss that takes gradients or writes to its arguments must be computed as in "
                f"the step before (got another graph, {self._signature}); repeat the step, which "
                f"looks again, or {ADVICE}"
            )
        return self._observe(call)

    def _observe(self, call: LossMade) -> Any:
        self._outside = LossObserver(is_safe=self.pattern.is_mixed)
        with self._outside:
            return call.repeat()

    def _is_usual(self, loss: torch.Tensor, output: Any) -> bool:
        """Whether a loss is computed as in the step before, as far as its graph shows."""
        # A loss computed inside of a stage cannot be repeated; see `_repeat`.
        if not loss.requires_grad or self._given.makes_own:
            return True
        self._signature = sign_graph(loss, output)
        known = self.pattern.signatures
        return not known or self._signature in known or self._is_hidden(loss)

    def find_known(self) -> KnownLoss | None:
        """Return what is known of the losses of this step, if that is all there is to know."""
        pattern, single = self.pattern, self.pattern.single
        if self.is_alone or self._given.makes_own or not self._given.is_training:
            return None
        if pattern.is_observed or pattern.is_opaque or len(pattern.signatures) != 1:
            return None
        (signature,) = pattern.signatures
        if pattern.top.startswith(_OPAQUE) or not signature.startswith(pattern.top):
            return None
        if single is None:
            return None
        try:
            weights = self._weights.of_all(single)
        except BatchError:
            # Where the labels of a batch count nothing, the loss may be another one.
            return None
        if weights is None:
            return None
        return KnownLoss(signature, pattern.top, [Share(w) for w in weights], single, weights)

    def note_repeated(self, known: KnownLoss, microbatches: Sequence[int]) -> None:
        """Note the microbatches whose losses were computed as before, and weighed elsewhere."""
        self._has_begun = bool(microbatches)
        self.is_empty = self._is_labelled = not microbatches
        for microbatch in microbatches:
            self._weights.begin_microbatch(microbatch)
            self._weights.repeat(known.term, known.weights[microbatch])

    def expect_counts(self, term: Term, found: Mapping[int, torch.Tensor | float]) -> None:
        """Check what losses counted that were weighed elsewhere."""
        self._weights.expect(term, found)

    def find_used(self) -> Collection[Sequence[float]]:
        """Return the weights of all microbatches, for each part of the losses here."""
        return self._weights.find_used() | self._divided.find_used()

    def check(self) -> None:
        """Raise if a loss counted something else than the labels of the step."""
        self._weights.check()
        self._divided.check()

    @property
    def is_due(self) -> bool:
        """Whether to check how the loss adds up: until that was shown, or if labels are uneven."""
        pattern = self.pattern
        if pattern.is_due or not pattern.is_tried:
            return True
        is_known = pattern.is_counted or pattern.is_confirmed
        return not is_known and self._weights.find_uneven() is not None

    def find_doubt(self) -> str | None:
        """Find labels that contradict a mean over rows, unless all of the loss is known."""
        pattern = self.pattern
        is_known = pattern.is_counted or pattern.is_confirmed
        if is_known or self._is_labelled or self._divided.is_found:
            return None
        is_labelled = any(isinstance(term.mean, Labelled) for term in pattern.terms)
        return None if is_labelled else self._weights.find_uneven()

    def weigh(self, microbatch: int, loss: torch.Tensor) -> Share:
        """Return the weight of a loss."""
        if self.is_alone:
            return Share(1.0)
        self._weights.begin_microbatch(microbatch)
        try:
            return self._weigh(microbatch, loss)
        finally:
            # Keep nothing of the graph alive.
            self._inside = self._outside = self._call = None

    def _weigh(self, microbatch: int, loss: torch.Tensor) -> Share:
        if self._outside is None:
            return Share(self._repeat(microbatch, loss))
        observers = [one for one in (self._inside, self._outside) if one is not None]
        calls = [call for observer in observers for call in observer.calls]
        if not calls and self._is_hidden(loss):
            return Share(self._repeat(microbatch, loss))
        top = name_top(loss)
        is_shown = loss.requires_grad or any(
            call.reduction == "mean" and call.is_value(loss) for call in calls
        )
        call = self._call
        if calls and not is_shown and not self._given.makes_own and call is not None:
            again = call.repeat_with_graph(loss)
            loss, calls = (loss, calls) if again is None else (again.loss, again.calls)
        form = self._memory.find_form(self._given.names, loss, calls, self._given.items)
        if not form.used and any(loss is one for observer in observers for one in observer.sums):
            raise BatchError(
                "a loss that ends in .sum() must say whether it adds up over the microbatches "
                f"(got none of torch's own sums); {ADVICE}"
            )
        used = [calls[number] for number in form.used]
        terms = self._find_terms(used, microbatch, form, loss)
        self.pattern.learn(
            used,
            terms,
            form,
            top=top,
            signature=self._signature,
            is_training=self._given.is_training,
        )
        weights = [
            0.0 if term is None else self._weights.of_one(number, term, call, microbatch)
            for number, call, term in zip(number_alike(used), used, terms, strict=True)
        ]
        return self._join(microbatch, loss, used, terms, weights, form)

    def _is_hidden(self, loss: torch.Tensor) -> bool:
        """Whether the calls of a known loss cannot be seen, because it is compiled or captured."""
        is_opaque = self.pattern.is_opaque or name_top(loss).startswith(_OPAQUE)
        return self.pattern.single is not None and is_opaque

    def _repeat(self, microbatch: int, loss: torch.Tensor) -> float:
        """Return the weight of a loss that was computed as in an earlier microbatch."""
        self.is_empty = self._is_labelled = False
        pattern, single, top = self.pattern, self.pattern.single, name_top(loss)
        is_same = top == pattern.top or pattern.is_opaque or top.startswith(_OPAQUE)
        if single is None and is_same:
            return 1.0 if pattern.is_counted else self._by_rows(microbatch, loss)
        weights = None if single is None else self._weights.of_all(single)
        if weights is None or not (is_same or self._weights.is_even(weights)):
            before = pattern.top if single is None else f"{pattern.top} of {single.source}"
            pattern.forget()
            raise BatchError(
                f"all microbatches must compute their losses in the same way (got {top}, after "
                f"{before} in earlier ones); repeat the step, which looks again, or {ADVICE}"
            )
        assert single is not None, "weights are those of a call"
        found = read_count(loss, top)
        if found is not None:
            self._weights.expect(single, {microbatch: found})
        self._weights.repeat(single, weights[microbatch])
        return weights[microbatch]

    def _by_rows(self, microbatch: int, loss: torch.Tensor) -> float:
        quotients = () if self._inside is None else self._inside.quotients
        found = self._divided.weigh(microbatch, loss, quotients)
        return self._weights.by_rows(microbatch) if found is None else found

    def _find_terms(
        self, used: Sequence[LossCall], microbatch: int, form: LossForm, loss: torch.Tensor
    ) -> Sequence[Term | None]:
        """Find what each call counts; None for a call that counts nothing."""
        known = self.pattern.terms
        is_like = len(known) == len(used) and all(map(Term.is_like, known, used))
        if not is_like or self.pattern.is_due:
            sources = [term.source for term in known] if is_like else [None] * len(used)
            terms: list[Term | None] = []
            for call, source in zip(used, sources, strict=True):
                taken = [term.source for term in terms if term is not None and term.source]
                reading = read_call(call, form, loss, adds_up=self._given.adds_up)
                terms.append(self._find_term(call, microbatch, reading, source, taken))
            return terms
        for term, call in zip(known, used, strict=True):
            # A mean stays a mean, but a sum may be divided by something else each time.
            if (
                call.reduction != "mean"
                and read_call(call, form, loss, adds_up=self._given.adds_up) != term.reading
            ):
                self.pattern.forget()
                raise BatchError(
                    "all microbatches must compute their losses in the same way (got a sum that "
                    f"is divided by other things in some of them); {ADVICE}"
                )
        return known

    def _find_term(
        self,
        call: LossCall,
        microbatch: int,
        reading: Reading,
        known: Source | None,
        taken: Collection[Source],
    ) -> Term | None:
        if reading != "mean":
            return Term(call.reduction, reading, call.mean, None)
        source = self._weights.find_source(call, microbatch, known, taken)
        term = Term(call.reduction, reading, call.mean, source)
        if call.count():
            return term
        # Raises an error if nothing counts in the whole batch.
        self._weights.of_all(term)
        return None

    def _join(
        self,
        microbatch: int,
        loss: torch.Tensor,
        used: Sequence[LossCall],
        terms: Sequence[Term | None],
        weights: Sequence[float],
        form: LossForm,
    ) -> Share:
        """Return a weight by rows, and parts for the calls that have another weight."""
        is_known = any(term is None or isinstance(term.mean, Labelled) for term in terms)
        self.is_empty &= not form.has_rest and terms.count(None) == len(terms)
        self._is_labelled &= is_known
        if not form.is_linear:
            raise BatchError(
                "a loss must be a sum of what is averaged over the batch, each by a factor (got "
                f"another function of one of torch's losses, such as its root); {ADVICE}"
            )
        if not form.used and not form.has_rest:
            return Share(1.0)
        is_rest = [term is not None and term.reading == "rest" for term in terms]
        if not all(is_rest) and not form.has_rest and len(set(weights)) == 1:
            return Share(weights[0])
        base = self._by_rows(microbatch, loss)
        weights = [base if rest else one for one, rest in zip(weights, is_rest, strict=True)]
        if all(is_close(weight, base) for weight in weights):
            return Share(base)
        extra = [weight - base for weight in weights]
        return Share(base, make_parts(self._memory, self._given, loss, used, extra))
