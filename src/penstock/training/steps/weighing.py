"""How a pipeline weighs the losses of its microbatches, as its `reduction` says."""

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import nn

from penstock.errors import BatchError
from penstock.loss.calls import Labelled
from penstock.loss.joined import Merge
from penstock.loss.labels import LABELS, BatchLabels, Relation, derive
from penstock.loss.memory import LossMemory
from penstock.loss.probe import ComparedWeights
from penstock.loss.reduction import Reduction, share_counts, weigh_rows
from penstock.loss.steady_weights import weigh_steadily
from penstock.loss.term_weights import Given
from penstock.loss.weigher import KnownWeights, Weigher
from penstock.ranks.control import Control
from penstock.training.batch.agreement import Agreed

__all__ = ["Weighing"]

# The keyword by which a model is given the count of the whole batch, so that its losses add up.
_NUM_ITEMS = "num_items_in_batch"
# A count that could not be made.
_UNKNOWN = float("nan")


class Weighing:
    """The weights of losses, step by step; what was learned of the loss is kept."""

    def __init__(
        self, reduction: Reduction, *, makes_own: bool, merge: Merge | None = None
    ) -> None:
        self._reduction = reduction
        self._makes_own = makes_own
        self._merge = merge
        self._memory = LossMemory()

    @property
    def counts_target(self) -> bool:
        """Whether a target is counted, even if the loss takes none."""
        return callable(self._reduction)

    def ask_for_counts(
        self, control: Control, agreed: Agreed, labels: Sequence[Any] | None
    ) -> Mapping[Relation, Sequence[float]] | None:
        """Share the counts of labels with a rank that needs them; all ranks do this together.

        `labels` are this rank's, one per microbatch. Nothing is sent if the labels are where they
        are needed, or are not needed at all.
        """
        is_needed = self._makes_own and self._reduction not in ("mean", "sum")
        if not agreed.lacks_labels or not is_needed:
            return None
        count = len(agreed.rows.rows)
        mine = [_UNKNOWN] * 2 * count if labels is None else self._count_labels(labels)
        form = struct.Struct(f"!?{2 * count}d")
        data = control.gather_bytes(form.pack(bool(labels), *mine))
        everyone = [form.unpack(told) for told in data]
        counts = next((told for has_labels, *told in everyone if has_labels), None)
        if counts is None:
            return None
        return {Relation.SAME: counts[:count], Relation.SHIFTED: counts[count:]}

    def _count_labels(self, labels: Sequence[Any]) -> list[float]:
        """Count one rank's labels in both ways; what cannot be counted is not a number."""
        return [self._count_one(label, relation) for relation in Relation for label in labels]

    def _count_one(self, labels: Any, relation: Relation) -> float:
        if callable(self._reduction):
            return float(self._reduction(labels))
        if labels is None:
            return 0.0
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return _UNKNOWN
        return float(Labelled().count(derive(labels, relation)))

    def make(
        self,
        agreed: Agreed,
        columns: Mapping[str, Sequence[Any]],
        told: Mapping[Relation, Sequence[float]] | None,
        *,
        is_training: bool,
        dims: Sequence[int] = (0,),
    ) -> Weigher:
        """Return what weighs the losses of a step; `columns` are its arguments by microbatch.

        `dims` are the dimensions along which these may be joined again.
        """
        rows = agreed.rows.rows
        match self._reduction:
            case "sum":
                return KnownWeights([1.0] * len(rows))
            case "mean":
                return _weigh_rows(tuple(rows))
            case "auto":
                given = Given(
                    rows,
                    BatchLabels(columns),
                    told,
                    agreed.rows.doubt,
                    adds_up=_NUM_ITEMS in agreed.keywords,
                    makes_own=self._makes_own,
                    is_training=is_training,
                    names=tuple(sorted(agreed.keywords)),
                )
                careful = ComparedWeights(self._memory, given, dims=dims, merge=self._merge)
                return weigh_steadily(careful)
            case count:
                labels = columns.get("target", columns.get(LABELS))
                if labels is not None:
                    return KnownWeights(share_counts([float(count(part)) for part in labels]))
                if told is not None:
                    return KnownWeights(share_counts(told[Relation.SAME]))
                return _MissingCounts()


@lru_cache(maxsize=16)
def _weigh_rows(rows: tuple[int, ...]) -> KnownWeights:
    """Return weights by rows, from the cache because the batches of most steps have the same."""
    return KnownWeights(weigh_rows(rows))


class _MissingCounts:
    """Refuses to weigh a loss, on the rank that has one, since there is nothing to count."""

    def observe_stage(self, module: nn.Module) -> None:  # noqa: ARG002  # Weigher's form
        return

    def make_loss(
        self,
        function: Callable[..., Any],
        microbatch: int,  # noqa: ARG002  # Weigher's form
        output: Any,
        target: Any,
    ) -> Any:
        return function(output, target)

    def check(self) -> None:
        return

    def weigh(self, microbatch: int, loss: torch.Tensor) -> NoReturn:  # noqa: ARG002  # Weigher's form
        raise BatchError(
            "a reduction that is a function needs something to count (got neither target= nor "
            "labels=); pass what the loss is a mean over as target="
        )
