"""Comparison of the loss of several microbatches together with the sum of their own losses.

How a loss adds up over microbatches is read off its calls and its graph, and a loss written by
hand is assumed to be a mean over rows. Whether that is right is checked for every way to compute a
loss: in its first steps, until one could have shown a mistake, and in steps 2, 4, 8 and so on:

    microbatches      0   1   2   3
    as one batch      loss([0 1 2 3])          its value, and its gradients by the outputs
    as we weigh them  sum of weight * loss(i)  the same, or the step is refused
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import BatchError
from penstock.loss.calls import LossObserver
from penstock.loss.comparing import (
    SumOfLosses,
    Together,
    agree,
    describe_gradients,
    find_gradients,
)
from penstock.loss.contract import require_number
from penstock.loss.found_weights import FoundWeights
from penstock.loss.joined import Merge, join_values
from penstock.loss.memory import LossMemory
from penstock.loss.rerun import LossMade, as_leaves, copy_tensors, run_again
from penstock.loss.term_weights import ADVICE, Given, uneven_error
from penstock.loss.weigher import KnownLoss, Share
from penstock.tensors.output_tree import fill, tensors_of
from penstock.torch_private import tree_leaves

__all__ = ["ComparedWeights"]

# As many microbatches are compared as have outputs of this size together, but at least two...
_ENOUGH_BYTES = 2**24
# ...unless those two are larger than this.
_MOST_BYTES = 2**28
# The largest allowed difference between two ways to compute a number, relative to the largest.
_ACCURACY = {torch.float64: 1e-6, torch.float32: 1e-4}
_LEAST_ACCURACY = 3e-2
_FAST_ACCURACY = 1e-2
# How far apart the losses of microbatches must be to show that a loss is, say, a root.
_LEAST_SPREAD = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """The arguments of the loss function for one microbatch."""

    output: Any
    target: Any

    def copy(self) -> tuple[Any, Any]:
        """Copy both, since a loss may write to what it is given."""
        copies = [tensor.clone() for tensor in tensors_of(self.output)]
        return fill(self.output, copies), copy_tensors(self.target, {})


class _Incomparable(Exception):  # noqa: N818  # not an error, but a reason
    """The reason why a loss could not be compared."""


class ComparedWeights:
    """Found weights (`found`) that are checked, in some steps, with the loss of a larger batch."""

    def __init__(
        self, memory: LossMemory, given: Given, *, dims: Sequence[int], merge: Merge | None
    ) -> None:
        self._memory = memory
        self._given = given
        self._dims = dims
        self._merge = merge
        self.found = FoundWeights(memory, given)
        self.needs_graph = self.found.needs_graph
        self._function: Callable[..., Any] | None = None
        self._kept: dict[int, _Kept] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._shares: dict[int, Share] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._bytes = 0
        self._is_due = False

    def observe_stage(self, module: nn.Module) -> AbstractContextManager[object] | None:
        """Observe the calls of loss functions in a last stage, unless its loss is known."""
        return self.found.observe_stage(module)

    def make_loss(
        self, function: Callable[..., Any], microbatch: int, output: Any, target: Any
    ) -> Any:
        """Call the loss function, and keep its arguments if it will be called again."""
        if self.found.is_alone:
            return function(output, target)
        is_first, self._function = self._function is None, function
        # Before the call, since a loss may write to its arguments.
        is_asked = self.found.is_due if is_first else self._is_due
        is_kept = is_asked and self._keep(microbatch, output, target)
        loss = self.found.make_loss(function, microbatch, output, target)
        if is_first:
            self._is_due = self.found.is_due
            if self._is_due and not is_asked:
                self._keep(microbatch, output, target)
            elif is_kept and not self._is_due:
                self._kept.clear()
        return loss

    def find_known(self) -> KnownLoss | None:
        """Return what is known of the losses of this step, if there is nothing to compare."""
        known = self.found.find_known()
        return None if known is None or self.found.is_due else known

    def settle(self, made: LossMade, microbatch: int, loss: Any) -> Any:
        """Return a loss that was computed elsewhere, but not as before."""
        self._function = made.function
        loss = self.found.settle(made, loss)
        self._is_due = self.found.is_due
        if self._is_due:
            self._keep(microbatch, made.output, made.target)
        return loss

    def weigh(self, microbatch: int, loss: torch.Tensor) -> Share:
        """Return the weight of a loss."""
        share = self.found.weigh(microbatch, loss)
        if self._is_due:
            self._shares[microbatch] = share
        if microbatch in self._kept and share.weight:
            self._values[microbatch] = loss.detach().clone()
        return share

    def find_used(self) -> Collection[Sequence[float]]:
        """Return the weights of all microbatches, for each part of the losses here."""
        return self.found.find_used()

    def check(self) -> None:
        """Raise if a loss counted something else, or does not add up with these weights."""
        self.found.check()
        if not self._is_due or self._function is None:
            return
        pattern = self.found.pattern
        try:
            is_compared = self._compare(self._function)
            kept = sorted(self._kept)
            targets = [self._kept[number].target for number in kept]
            if is_compared and self._given.labels.pick(kept, targets).find_uneven() is not None:
                pattern.is_confirmed = True
            pattern.is_tried |= is_compared and self._is_conclusive()
        except _Incomparable as reason:
            pattern.is_tried |= self._is_conclusive()
            self._warn(str(reason))
        finally:
            self._kept.clear()
            self._shares.clear()
            self._copies.clear()
        doubt = self.found.find_doubt()
        if doubt is not None:
            raise uneven_error(doubt)

    def _is_conclusive(self) -> bool:
        """Whether this step would show it if the loss did not add up.

        A single microbatch shows nothing, nor do losses that are not finite or that are all the
        same. A loss that can never be compared is not tried again.
        """
        if len(self._shares) - len(_find_empty(self._shares)) < 2:
            return False
        values = [float(value) for value in self._values.values()]
        if not all(map(math.isfinite, values)):
            return False
        if len(values) < 2:
            return len(self._kept) < 2
        least = min(_LEAST_SPREAD, self._find_accuracy([])) * max(map(abs, values))
        return max(values) - min(values) > least

    def _warn(self, reason: str) -> None:
        """Warn once that a loss is assumed to be a mean over rows without a comparison."""
        is_known = self.found.pattern.is_counted or self.found.is_empty
        is_known |= self._given.makes_own
        if is_known or self._memory.has_warned or self.found.find_doubt() is not None:
            return
        self._memory.has_warned = True
        warnings.warn(
            "the losses of microbatches are weighted by rows, but could not be compared with the "
            f"loss of several microbatches together, because {reason}; if the loss is a mean over "
            "rows, say so with Pipeline(reduction='mean')",
            stacklevel=2,
        )

    def _keep(self, microbatch: int, output: Any, target: Any) -> bool:
        """Keep a copy of an output if it is small enough and can be joined; return whether."""
        try:
            tensors = tensors_of(output)
        except Exception:
            # An output of any type is allowed, but cannot always be joined.
            return False
        if self._given.makes_own and any(t.requires_grad and not t.dim() for t in tensors):
            return False
        given = [leaf for leaf in tree_leaves(target) if isinstance(leaf, torch.Tensor)]
        size = self._bytes + sum(tensor.nbytes for tensor in (*tensors, *given))
        if size > (_MOST_BYTES if len(self._kept) < 2 else _ENOUGH_BYTES):
            return False
        if any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors):
            return False
        self._bytes = size
        with torch.inference_mode(mode=False), torch.no_grad():
            copies = [tensor.detach().clone() for tensor in tensors]
        try:
            output = fill(output, copies)
        except Exception:
            return False
        self._kept[microbatch] = _Kept(output, copy_tensors(target, self._copies))
        return True

    def _compare(self, function: Callable[..., Any]) -> bool:
        """Compare the microbatches that were kept with one batch of all of them.

        Return whether there was a number to compare with.
        """
        numbers = sorted(self._kept)
        if len(numbers) < 2 or not self._values:
            raise _Incomparable("fewer than two microbatches are available where it is computed")
        tensors = tensors_of(self._kept[numbers[0]].output)
        with _explained(), run_again(function, tensors):
            self._require_same_again(function)
            accuracy = self._find_accuracy(tensors)
            ours = self._as_in_step(self._make_ours(function, numbers))
            found = [self._make_together(function, numbers, dim) for dim in self._dims]
        made = [one for one in found if isinstance(one, Together)]
        if not made:
            raise _Incomparable(str(found[0]))
        if not any(agree(ours, one, accuracy) for one in made):
            raise BatchError(
                f"the losses of microbatches must make up that of their rows together (got "
                f"{ours.value:.6g} from microbatches {_shown(numbers)}, but "
                f"{made[0].made.value:.6g} for all of their rows in one call"
                f"{describe_gradients(ours, made[0])}); {ADVICE}. A loss that "
                "compares rows with each other cannot be split; reduction='mean' trains the mean "
                "of what it is in each microbatch"
            )
        return any(one.is_finite for one in made)

    def _require_same_again(self, function: Callable[..., Any]) -> None:
        """Exclude losses that depend on more than their arguments."""
        number, expected = next(iter(self._values.items()))
        with torch.no_grad(), LossObserver(is_safe=self.found.pattern.is_mixed):
            again = require_number(function(*self._kept[number].copy()))
        accuracy = self._find_accuracy([again])
        is_same = math.isclose(float(again), float(expected), rel_tol=accuracy, abs_tol=1e-30)
        if not is_same and not (math.isnan(float(again)) and math.isnan(float(expected))):
            raise _Incomparable(
                "it gives another number when it is called again without a graph "
                f"({float(again):g} for {float(expected):g})"
            )

    def _find_accuracy(self, tensors: Sequence[torch.Tensor]) -> float:
        """Return the allowed relative difference, by the dtypes of these tensors and losses."""
        values = next(iter(self._values.values()))
        found = [t for t in (*tensors, values) if t.is_floating_point() or t.is_complex()]
        kinds = {tensor.abs().dtype if tensor.is_complex() else tensor.dtype for tensor in found}
        accuracy = max((_ACCURACY.get(kind, _LEAST_ACCURACY) for kind in kinds), default=0.0)
        device = values.device.type
        if torch.is_autocast_enabled(device):
            return _LEAST_ACCURACY
        is_fast = device == "cuda" and torch.get_float32_matmul_precision() != "highest"
        return max(accuracy, _FAST_ACCURACY) if is_fast else accuracy

    def _make_ours(self, function: Callable[..., Any], numbers: Sequence[int]) -> SumOfLosses:
        """Sum the weighted losses of these microbatches as if they were the whole batch."""
        known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        targets = [copy_tensors(self._kept[number].target, known) for number in numbers]
        weights = FoundWeights(LossMemory(), self._given.pick(numbers, targets))
        total, gradients = 0.0, []
        for place, number in enumerate(numbers):
            output, leaves = as_leaves(self._kept[number].output)
            loss = require_number(weights.make_loss(function, place, output, targets[place]))
            share = weights.weigh(place, loss)
            roots: list[Any] = []
            factors: list[float] = []
            if share.weight:
                total += share.weight * float(loss.detach())
                roots, factors = [loss], [share.weight]
            for part in share.parts if share.weight else ():
                total += part.weight * float(part.value)
                if part.edge is not None:
                    roots.append(part.edge)
                    factors.append(part.weight)
            gradients.append(find_gradients(roots, factors, loss, leaves))
        return SumOfLosses(total, gradients)

    def _as_in_step(self, ours: SumOfLosses) -> SumOfLosses:
        """Replace the value by the loss of the step, if all microbatches were kept."""
        if self._values.keys() | _find_empty(self._shares) != set(range(len(self._given.rows))):
            return ours
        total = 0.0
        for number, value in self._values.items():
            share = self._shares[number]
            total += share.weight * float(value)
            total += sum(part.weight * float(part.value) for part in share.parts)
        return SumOfLosses(total, ours.gradients)

    def _make_together(
        self, function: Callable[..., Any], numbers: Sequence[int], dim: int
    ) -> "Together | str":
        """Compute the loss of these microbatches in one call, or return why that fails."""
        kept = [self._kept[number] for number in numbers]
        rows = [self._given.rows[number] for number in numbers]
        begun = [as_leaves(one.output) for one in kept]
        leaves = [leaf for _, leaves in begun for leaf in leaves]
        try:
            output = join_values([value for value, _ in begun], rows, dim, self._merge)
            target = join_values([one.target for one in kept], rows, dim)
            loss = require_number(function(output.value, copy_tensors(target.value, {})))
        except Exception as error:
            # A loss may raise anything if it does not support joined arguments.
            return f"it cannot be called for them: {error}"
        gradients = find_gradients([loss], [1.0], loss, leaves)
        pairs = zip(gradients, leaves, strict=True)
        size = sum(float((gradient * leaf.detach()).abs().sum()) for gradient, leaf in pairs)
        found = iter(gradients)
        made = SumOfLosses(float(loss.detach()), [[next(found) for _ in one] for _, one in begun])
        return Together(made, output, size)


@contextmanager
def _explained() -> Iterator[None]:
    """Let no error of a loss that is called again break the step."""
    try:
        yield
    except _Incomparable:
        raise
    except Exception as error:
        raise _Incomparable(f"it fails when it is called again ({error})") from error


def _find_empty(shares: Mapping[int, Share]) -> set[int]:
    """Return the microbatches in which nothing counts."""
    return {number for number, share in shares.items() if not share.weight}


def _shown(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
