"""The calls of torch's loss functions in a loss, and what each is a mean over."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from penstock.modules.compiled import run_eagerly
from penstock.torch_private import OpOverload, top_saved_tensors_default_hooks

__all__ = [
    "HINTED_IGNORE_INDEX",
    "Elementwise",
    "Labelled",
    "LossCall",
    "LossObserver",
    "Mean",
    "number_alike",
    "observe_eagerly",
]

# The label that torch and transformers ignore by default.
HINTED_IGNORE_INDEX = -100
# Losses that are a mean over the labels that count; one microbatch may have few of them.
_COUNTED = {"cross_entropy", "linear_cross_entropy", "nll_loss"}
# The same losses as operations of a traced graph, where reductions are numbers.
_OPERATIONS = {
    "cross_entropy_loss": "cross_entropy",
    "nll_loss": "nll_loss",
    "nll_loss_nd": "nll_loss",
    "nll_loss2d": "nll_loss",
}
# A loss whose mean is one over rows, so that only its sum differs from what is not known.
_BY_ROWS = "ctc_loss"
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@dataclass(frozen=True, slots=True, eq=False)
class Labelled:
    """A mean over labels, each with the weight of its class; one index is ignored.

    Labels that are probabilities count once per position.
    """

    ignore_index: int | None = HINTED_IGNORE_INDEX
    class_weights: torch.Tensor | None = None
    classes: int | None = None

    def count(self, target: torch.Tensor) -> torch.Tensor | float:
        """Return the number that a mean over these labels is divided by."""
        if target.is_floating_point():
            classes = target.shape[1] if target.dim() > 1 else target.shape[0]
            return target.numel() / max(classes, 1)
        return self._weigh(target).sum()

    def count_each(self, targets: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | float]:
        """Return the number of each of these targets, in few operations if they are alike."""
        forms = {(target.shape, target.dtype, target.device) for target in targets}
        if len(forms) != 1 or targets[0].is_floating_point() or not targets[0].dim():
            return [self.count(target) for target in targets]
        weights = self._weigh(torch.stack(list(targets)))
        counts: list[float] = weights.sum(tuple(range(1, weights.dim()))).tolist()
        return counts

    def _weigh(self, target: torch.Tensor) -> torch.Tensor:
        """Return how much each label counts."""
        is_counted = self.find_counted(target)
        if self.class_weights is None:
            return is_counted
        weights = self.class_weights.detach().double()[target.where(is_counted, 0)]
        return weights.where(is_counted, 0)

    def find_counted(self, target: torch.Tensor) -> torch.Tensor:
        """Return which labels count; a label outside the classes counts as ignored."""
        ignored, classes = self.ignore_index, self.classes
        if classes is None:
            is_any = torch.ones_like(target, dtype=torch.bool)
            return is_any if ignored is None else target != ignored
        is_class = target.clamp(0, classes - 1) == target
        if ignored is None or not 0 <= ignored < classes:
            return is_class
        return is_class & (target != ignored)

    def is_like(self, other: "Mean") -> bool:
        """Whether both count in the same way."""
        return (
            isinstance(other, Labelled)
            and (self.ignore_index, self.classes) == (other.ignore_index, other.classes)
            and _are_equal(self.class_weights, other.class_weights)
        )


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether class weights are equal; a loss function may create them in every call."""
    if one is None or other is None or one is other:
        return one is other
    return one.device == other.device and torch.equal(one, other)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """A mean over all elements of a target."""

    def count(self, target: torch.Tensor) -> torch.Tensor | float:
        """Return the number of elements."""
        return float(target.numel())

    def count_each(self, targets: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | float]:
        """Return the number of elements of each of these targets."""
        return [float(target.numel()) for target in targets]

    def is_like(self, other: "Mean") -> bool:
        """Whether both count in the same way."""
        return isinstance(other, Elementwise)


Mean: TypeAlias = Labelled | Elementwise


@dataclass(frozen=True, slots=True, eq=False)
class LossCall:
    """One call of a loss function: its arguments and its result, as they were after the call.

    `mean` is what the function averages if its reduction is a mean. `size` is the number of
    elements of its largest argument. `is_hooked` says that hooks, such as those of a checkpoint,
    replace the tensors saved for its backward.
    """

    reduction: str
    target: torch.Tensor
    size: int
    mean: Mean
    value: torch.Tensor
    edge: GradientEdge | None
    is_hooked: bool

    def count(self) -> float:
        """Return the number that a mean of this call is divided by."""
        if isinstance(self.mean, Elementwise):
            return float(self.size)
        return float(self.mean.count(self.target))

    def is_value(self, loss: torch.Tensor) -> bool:
        """Whether a loss has the value of this call's result."""
        if self.value.numel() != 1:
            return False
        value, given = self.value.double().reshape(()), loss.detach().double()
        return bool(torch.isclose(value, given, rtol=0, atol=0, equal_nan=True))

    def is_share(self, loss: torch.Tensor, items: float) -> bool:
        """Whether a loss is this sum divided by the number of items of the whole batch."""
        if self.reduction != "sum" or self.value.numel() != 1:
            return False
        accuracy = 16 * torch.finfo(self.value.dtype).eps
        return math.isclose(float(self.value), float(loss) * items, rel_tol=accuracy)

    def is_divided(self, loss: torch.Tensor) -> bool:
        """Whether a loss is the sum of the results divided by what counts, and by nothing else."""
        count, size = self.count(), self.target.numel()
        if not count:
            return True
        total, found = float(self.value.double().sum()), float(loss.detach())
        accuracy = 16 * torch.finfo(self.value.dtype).eps
        is_mean = math.isclose(total, found * count, rel_tol=accuracy)
        is_of_all = count != size and math.isclose(total, found * size, rel_tol=accuracy)
        return is_mean and not is_of_all


def number_alike(calls: Sequence[LossCall]) -> list[int]:
    """Number each call among the similar calls: 0 for the first one, 1 for the second."""
    return [
        sum(c.reduction == call.reduction and c.mean.is_like(call.mean) for c in calls[:place])
        for place, call in enumerate(calls)
    ]


class LossObserver(TorchFunctionMode):
    """A record of the calls of loss functions in this thread.

    With `is_safe`, a mean over no labels returns zero instead of NaN, so that other parts of the
    loss keep their values.
    """

    def __init__(self, *, is_safe: bool) -> None:
        super().__init__()
        self._is_safe = is_safe
        self.calls: list[LossCall] = []
        self.sums: list[torch.Tensor] = []
        # Where tensors of one element, and not plain numbers, were divided by.
        self.quotients: set[Node | None] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, and record the call if it is a loss."""
        result = func(*args, **(kwargs or {}))
        if func in _SUMMING and result.numel() == 1 and args[0].numel() > 1:
            self.sums.append(result)
        if func in _DIVIDING and isinstance(args[-1], torch.Tensor) and args[-1].numel() == 1:
            self.quotients.add(result.grad_fn)
        signature = _signature_of(func)
        if signature is None or not isinstance(result, torch.Tensor):
            return result
        bound = signature.bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        return self._record(func, bound, result)

    def _record(
        self, func: Callable[..., Any], bound: inspect.BoundArguments, result: torch.Tensor
    ) -> torch.Tensor:
        """Record the call of a loss function; return its result, without NaN if `is_safe`."""
        call = _describe(func, bound.arguments, result)
        if call is None:
            return result
        if self._is_safe and call.reduction == "mean" and not call.count():
            bound.arguments["reduction"] = _SUMS[type(bound.arguments["reduction"])]
            result = func(*bound.args, **bound.kwargs)
            call = _describe(func, {**bound.arguments, "reduction": "mean"}, result) or call
        self.calls.append(call)
        return result


_SUMS: dict[type, Any] = {str: "sum", int: 2}
_DIVIDING = frozenset(
    {
        torch.div,
        torch.true_divide,
        torch.Tensor.div,
        torch.Tensor.div_,
        torch.Tensor.true_divide,
        torch.Tensor.__truediv__,
        torch.Tensor.__itruediv__,
        torch.ops.aten.div.Tensor,
    }
)
_SUMMING = frozenset({torch.sum, torch.Tensor.sum, torch.ops.aten.sum.default})


def _describe(
    func: Callable[..., Any], given: Mapping[str, Any], result: torch.Tensor
) -> LossCall | None:
    target, reduction = given.get("target", given.get("targets")), given["reduction"]
    reduction = _REDUCTIONS.get(reduction, reduction)
    if func.__name__ == _BY_ROWS and reduction == "mean":
        return None
    if not isinstance(target, torch.Tensor) or not isinstance(reduction, str):
        return None
    mean: Mean = Elementwise()
    if _is_counted(func):
        mean = Labelled(given["ignore_index"], given["weight"], _count_classes(given))
    edge = get_gradient_edge(result) if result.requires_grad else None
    # A copy, since the caller may add to its loss in place.
    value = result.detach().clone() if result.numel() == 1 else result.detach()
    size = max(part.numel() for part in given.values() if isinstance(part, torch.Tensor))
    is_hooked = top_saved_tensors_default_hooks(False) is not None
    return LossCall(reduction, target, size, mean, value, edge, is_hooked)


def _count_classes(given: Mapping[str, Any]) -> int | None:
    """Return the number of classes of a call, if its scores show it."""
    scores = given.get("input", given.get("self"))
    if "linear_weight" in given or not isinstance(scores, torch.Tensor):
        return None
    return scores.shape[1 if scores.dim() > 1 else 0]


def _is_counted(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "").split(".")[0]
    return _OPERATIONS.get(name, name) in _COUNTED


@lru_cache(maxsize=4096)
def _signature_of(func: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a loss function that has a reduction; None for anything else."""
    if isinstance(func, OpOverload):
        return _signature_of_operation(func)
    name = getattr(func, "__name__", "")
    if getattr(functional, name, None) is not func or name not in _LOSSES:
        return None
    return inspect.signature(func)


def _signature_of_operation(func: OpOverload) -> inspect.Signature | None:
    name = func._schema.name.removeprefix("aten::")
    if name not in _OPERATIONS:
        return None
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default_value
                if argument.has_default_value()
                else inspect.Parameter.empty,
            )
            for argument in func._schema.arguments
        ]
    )


def _names_of_losses() -> frozenset[str]:
    """Return the functions of `torch.nn.functional` that take a target and a reduction."""
    names = set()
    for name, value in vars(functional).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            parameters = inspect.signature(value).parameters
            if "reduction" in parameters and parameters.keys() & {"target", "targets"}:
                names.add(name)
    return frozenset(names)


_LOSSES = _names_of_losses()


@contextmanager
def observe_eagerly(observer: LossObserver) -> Iterator[None]:
    """Observe a stage, and run its compiled code eagerly, so that calls in it are seen."""
    with run_eagerly(), observer:
        yield
