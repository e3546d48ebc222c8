"""Weights of microbatches that are found out: what makes up the loss of the unsplit model.

A mean over labels that count (`cross_entropy`, `nll_loss`) is weighed by the labels that count in
each microbatch, a sum by one, and everything else by rows:

    loss of a microbatch   =  factor * cross_entropy  +  rest
    its part of the batch  =  factor * cross_entropy * labels here / labels
                              +  rest * rows here / rows

The calls are watched while the loss is made, until it is known to be the result of one of them;
from then on it is looked at again in steps 2, 4, 8 and so on, and what it counts in every step.
"""

import math
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.errors import BatchError
from penstock.loss.calls import Labelled, LossCall, LossWatch
from penstock.loss.form import COUNTING, LossForm, find_form, name_top, read_count
from penstock.loss.labels import Source
from penstock.loss.memory import KnownForm, LossMemory, Reading, Term
from penstock.loss.term_weights import ADVICE, Given, TermWeights, is_close
from penstock.loss.weigher import Part, Share

__all__ = ["FoundWeights"]

# Tops of graphs that do not show how a loss was made.
_OPAQUE = ("CompiledFunction", "_Replay")


class FoundWeights:
    """The weights of one step's losses."""

    def __init__(self, memory: LossMemory, given: Given) -> None:
        self._memory = memory
        self._given = given
        self._weights = TermWeights(given)
        self._habit = memory.begin_step((given.names, given.is_training))
        self._inside: LossWatch | None = None
        self._outside: LossWatch | None = None

    def watch_stage(self, module: nn.Module) -> AbstractContextManager[object]:
        """Watch the calls of loss functions in a last stage, unless it is known what it does."""
        habit = self._habit
        if self._is_alone or not self._given.makes_own or not habit.is_watched:
            return nullcontext()
        if not habit.top:
            habit.is_opaque = _is_compiled(module)
        self._inside = LossWatch(is_safe=habit.is_mixed)
        return _watching(self._inside)

    def watch_loss(self) -> AbstractContextManager[object]:
        """Watch the calls in a loss function."""
        # A stage that was watched may have settled what is to be watched.
        if self._is_alone or not (self._habit.is_watched or self._inside):
            return nullcontext()
        self._outside = LossWatch(is_safe=self._habit.is_mixed)
        return self._outside

    def check(self) -> None:
        """Refuse the step if a loss has counted something else than the labels said."""
        self._weights.check()

    @property
    def _is_alone(self) -> bool:
        """Whether there is one microbatch, whose loss is that of the batch."""
        return self._weights.num_microbatches == 1

    def weigh(self, microbatch: int, loss: torch.Tensor) -> Share:
        """Return what a loss counts for."""
        if self._is_alone:
            return Share(1.0)
        self._weights.begin_microbatch(microbatch)
        inside, outside = self._inside, self._outside
        self._inside = self._outside = None
        watches = [watch for watch in (inside, outside) if watch is not None]
        calls = [call for watch in watches for call in watch.calls]
        if outside is None or (self._is_hidden(loss) and not calls):
            return Share(self._repeat(microbatch, loss))
        form = self._find_form(loss, calls)
        if not form.used and any(loss is one for watch in watches for one in watch.sums):
            raise BatchError(
                "the loss ends in .sum(), which does not say whether it adds up over the "
                f"microbatches; {ADVICE}"
            )
        used = [calls[number] for number in form.used]
        terms = self._find_terms(used, microbatch, form, loss)
        self._learn(used, terms, form, loss)
        weights = [
            0.0 if term is None else self._weights.of_one(number, term, call, microbatch)
            for number, call, term in zip(_number_alike(used), used, terms, strict=True)
        ]
        return self._join(microbatch, loss, used, terms, weights, form)

    def _is_hidden(self, loss: torch.Tensor) -> bool:
        """Whether the calls of a known loss cannot be seen, since it is compiled or captured."""
        is_opaque = self._habit.is_opaque or name_top(loss).startswith(_OPAQUE)
        return self._habit.single is not None and is_opaque

    def _repeat(self, microbatch: int, loss: torch.Tensor) -> float:
        """Weigh a loss that was made as in an earlier microbatch, as far as can be seen."""
        habit, top = self._habit, name_top(loss)
        is_same = top == habit.top or habit.is_opaque or top.startswith(_OPAQUE)
        if habit.single is None:
            if not is_same:
                habit.forget()
            return self._weights.by_rows(microbatch, is_known=False)
        weights = self._weights.of_all(habit.single)
        if weights is None or not (is_same or self._weights.is_even(weights)):
            before = f"{habit.top} of {habit.single.source}"
            habit.forget()
            raise BatchError(
                f"all microbatches must make their losses alike (this one by {top}, earlier ones "
                f"by {before}); clear the gradients and repeat the step, which looks again, or "
                f"{ADVICE}"
            )
        found = read_count(loss)
        if found is not None:
            self._weights.expect(habit.single, microbatch, found)
        self._weights.repeat(habit.single, weights[microbatch])
        return weights[microbatch]

    def _find_form(self, loss: torch.Tensor, calls: Sequence[LossCall]) -> LossForm:
        if self._given.is_training and loss.requires_grad:
            form = find_form(loss, [call.edge for call in calls])
            known = self._memory.forms.get(self._given.names)
            if known is None or known.form != form or known.num_calls != len(calls):
                self._memory.forms[self._given.names] = KnownForm(len(calls), form)
            return form
        known = self._memory.forms.get(self._given.names)
        if known is not None and known.num_calls == len(calls):
            return known.form
        # Without a graph, a loss that is the result of a call is known by its value.
        same = [number for number, call in enumerate(calls) if _is_value(call, loss)]
        if same:
            return LossForm((same[-1],), has_rest=False, is_linear=True, is_scaled=False)
        used = tuple(number for number, call in enumerate(calls) if call.value.numel() == 1)
        return LossForm(used, has_rest=True, is_linear=True, is_scaled=True)

    def _find_terms(
        self, used: Sequence[LossCall], microbatch: int, form: LossForm, loss: torch.Tensor
    ) -> Sequence[Term | None]:
        """What each call counts; None if that is nothing, which teaches nothing."""
        known = self._habit.terms
        is_like = len(known) == len(used) and all(map(Term.is_like, known, used))
        if not is_like or self._habit.is_due:
            sources = [term.source for term in known] if is_like else [None] * len(used)
            terms: list[Term | None] = []
            for call, source in zip(used, sources, strict=True):
                taken = [term.source for term in terms if term is not None and term.source]
                reading = self._read(call, form, loss)
                terms.append(self._find_term(call, microbatch, reading, source, taken))
            return terms
        for term, call in zip(known, used, strict=True):
            # A mean is one always; a sum may be divided by one thing now, by another then.
            if call.reduction != "mean" and self._read(call, form, loss) != term.reading:
                self._habit.forget()
                raise BatchError(f"all microbatches must make their losses alike; {ADVICE}")
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
        # If nothing counts in the whole batch, this says so.
        self._weights.of_all(term)
        return None

    def _read(self, call: LossCall, form: LossForm, loss: torch.Tensor) -> Reading:
        """What a call comes to; one that is divided by what counts is a mean over that."""
        if call.reduction == "mean":
            return "mean"
        is_alone = len(form.used) == 1 and not form.has_rest and form.is_linear
        is_labelled = isinstance(call.mean, Labelled)
        if call.reduction == "sum" and is_alone and not form.is_scaled:
            return "sum"
        if call.reduction == "sum" and is_labelled and self._given.adds_up:
            return "sum"
        if is_alone and is_labelled and _is_mean(call, loss):
            return "mean"
        if call.reduction == "sum":
            raise BatchError(
                "the loss has a part that is a sum (reduction='sum'), which may or may not be "
                f"divided by what it is a mean over; {ADVICE}"
            )
        return "rest"

    def _learn(
        self,
        used: Sequence[LossCall],
        terms: Sequence[Term | None],
        form: LossForm,
        loss: torch.Tensor,
    ) -> None:
        """Keep what was seen; a loss that is one known call need not be watched again."""
        learned = tuple(term for term in terms if term is not None)
        habit = self._habit
        if len(learned) < len(terms):
            return
        habit.terms = learned
        habit.is_mixed = len(learned) + form.has_rest > 1
        habit.top = name_top(loss)
        habit.single = learned[0] if learned else None
        is_simple = form.is_linear and not habit.is_mixed
        habit.is_left = is_simple and (not learned or self._can_be_left(used[0], learned[0]))

    def _can_be_left(self, call: LossCall, term: Term) -> bool:
        """Whether a call that is the loss is known well enough without being watched."""
        if term.reading != "mean":
            return term.reduction == "sum" and term.reading == "sum"
        is_checked = self._given.is_training and self._habit.top in COUNTING and not call.is_hooked
        return term.source is not None and (is_checked or self._habit.is_opaque)

    def _join(
        self,
        microbatch: int,
        loss: torch.Tensor,
        used: Sequence[LossCall],
        terms: Sequence[Term | None],
        weights: Sequence[float],
        form: LossForm,
    ) -> Share:
        """Weigh each call by what it counts, and the rest by rows."""
        if not form.is_linear:
            raise BatchError(
                "a loss must be a sum of what is averaged over the batch, each by a factor (this "
                f"one is another function of a loss of torch, such as its root); {ADVICE}"
            )
        is_rest = [term is not None and term.reading == "rest" for term in terms]
        if not all(is_rest) and not form.has_rest and len(set(weights)) == 1:
            return Share(weights[0])
        is_known = any(term is None or isinstance(term.mean, Labelled) for term in terms)
        base = self._weights.by_rows(microbatch, is_known=is_known and not all(is_rest))
        if all(is_close(weight, base) for weight in weights):
            return Share(base)
        return Share(base, self._make_parts(loss, used, [weight - base for weight in weights]))

    def _make_parts(
        self, loss: torch.Tensor, used: Sequence[LossCall], extra: Sequence[float]
    ) -> list[Part]:
        """What each call counts for beside the weight of the whole loss."""
        known = self._memory.forms.get(self._given.names)
        trained: list[torch.Tensor | None] = [None] * len(used)
        if self._given.is_training and known is not None:
            edges = [call.edge for call in used if call.edge is not None]
            found = torch.autograd.grad(loss, edges, retain_graph=True, create_graph=True)
            trained = [factor if factor.requires_grad else None for factor in found]
            factors = tuple(factor.item() for factor in found)
            known = KnownForm(known.num_calls, known.form, factors)
            self._memory.forms[self._given.names] = known
        if known is None or len(known.factors) != len(used):
            raise BatchError(
                "how the loss is put together must be known from a training step before eval, "
                f"since its parts count differently; call step first, or {ADVICE}"
            )
        parts = []
        for call, factor, graph, weight in zip(used, known.factors, trained, extra, strict=True):
            if weight:
                parts.append(Part(call.value, call.edge, factor * weight))
            if weight and graph is not None:
                # The factor's own gradient; what it adds to the loss is counted already.
                edge = get_gradient_edge(graph)
                parts.append(
                    Part(torch.zeros_like(graph.detach()), edge, float(call.value) * weight)
                )
        return parts


def _number_alike(calls: Sequence[LossCall]) -> list[int]:
    """Number calls among those before them that are like them."""
    return [
        sum(c.reduction == call.reduction and c.mean.is_like(call.mean) for c in calls[:place])
        for place, call in enumerate(calls)
    ]


def _is_value(call: LossCall, loss: torch.Tensor) -> bool:
    if call.value.numel() != 1:
        return False
    value, given = call.value.double().reshape(()), loss.detach().double()
    return bool(torch.isclose(value, given, rtol=0, atol=0, equal_nan=True))


def _is_mean(call: LossCall, loss: torch.Tensor) -> bool:
    """Whether a loss is the sum of a call's result, divided by what counts and nothing else."""
    count, size = call.count(), call.target.numel()
    if not count:
        return True
    total, found = float(call.value.double().sum()), float(loss.detach())
    accuracy = 16 * torch.finfo(call.value.dtype).eps
    is_mean = math.isclose(total, found * count, rel_tol=accuracy)
    return is_mean and (count == size or not math.isclose(total, found * size, rel_tol=accuracy))


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was asked for the module or for some of it."""
    return any(
        inner._compiled_call_impl is not None or hasattr(inner, "_orig_mod")
        for inner in module.modules()
    )


@contextmanager
def _watching(watch: LossWatch) -> Iterator[None]:
    """Watch a stage, and run compiled code as it was written, since it would not be seen."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(watch)
        yield
