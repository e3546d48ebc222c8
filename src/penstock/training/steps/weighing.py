"""How a pipeline weighs the losses of its microbatches, as its `reduction` says."""

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import nn

from penstock.errors import BatchError
from penstock.ir.schedule import Schedule
from penstock.loss.calls import Labelled
from penstock.loss.joined import Merge
from penstock.loss.labels import LABELS, BatchLabels, Relation, derive
from penstock.loss.memory import LossMemory
from penstock.loss.probe import ComparedWeights
from penstock.loss.reduction import Reduction, share_counts, weigh_rows
from penstock.loss.steady_weights import weigh_steadily
from penstock.loss.term_weights import ADVICE, Given
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
        self._is_apart = False

    @property
    def counts_target(self) -> bool:
        """Whether a target is counted, even if the loss takes none."""
        return callable(self._reduction)

    def expect_apart(self, schedule: Schedule, ranks: Sequence[int]) -> None:
        """Note whether several processes make losses, as with DualPipe; `ranks` are those here."""
        flow, holder = schedule.dataflow, schedule.placement.rank_of_stage
        last = [stage for stage in range(schedule.num_stages) if not flow.consumers(stage)]
        has_one_part = len({flow.parts[stage] for stage in last}) == 1
        is_spread = len({holder[stage] for stage in last}) > 1
        self._is_apart = has_one_part and is_spread and len(ranks) < schedule.num_ranks

    def compare(self, control: Control, weigher: Weigher | None) -> None:
        """Raise, on all ranks, if those that have losses weigh them differently.

        A rank that sees some microbatches alone may take other labels for those that count.
        """
        if weigher is None or not self._is_apart or self._reduction != "auto":
            return
        everyone = [
            {tuple(weights) for weights in used}
            for used in control.gather([list(weights) for weights in weigher.find_used()])
        ]
        if any(not used <= max(everyone, key=len) for used in everyone):
            raise BatchError(
                "all ranks with a last stage must find the same weights of the losses (got "
                f"{' and '.join(str(sorted(used)) for used in everyone if used)}); {ADVICE}"
            )

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
                    items=_count_items(columns),
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


def _count_items(columns: Mapping[str, Sequence[Any]]) -> float | None:
    """Return the count of the whole batch that the model is given, if it is on this rank."""
    given = columns.get(_NUM_ITEMS, ())
    found = given[0] if given else None
    if isinstance(found, torch.Tensor):
        return float(found) if found.numel() == 1 and found.is_cpu else None
    return float(found) if isinstance(found, int | float) else None


@lru_cache(maxsize=16)
def _weigh_rows(rows: tuple[int, ...]) -> KnownWeights:
    """Return weights by rows, from the cache because the batches of most steps have the same."""
    return KnownWeights(weigh_rows(rows))


class _MissingCounts:
    """Refuses to weigh a loss, on the rank that has one, since there is nothing to count."""

    needs_graph = False

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

    def find_used(self) -> tuple[()]:
        return ()

    def weigh(self, microbatch: int, loss: torch.Tensor) -> NoReturn:  # noqa: ARG002  # Weigher's form
        raise BatchError(
            "a reduction that is a function needs something to count (got neither target= nor "
            "labels=); pass what the loss is a mean over as target="
        )
