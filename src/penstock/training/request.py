"""What the user asked of one step: described for the other ranks, and split into microbatches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.runtime.aliases import Aliases
from penstock.runtime.executor import Microbatches
from penstock.runtime.microbatch import split_batch
from penstock.training.batch import Accepted, BatchFacts, describe_batch, split_keywords
from penstock.training.batch_rows import Rows
from penstock.training.weights import Reduction, weigh_losses, weigh_rows

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """One step as it was asked for on this rank."""

    is_training: bool
    microbatches: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    keeps_outputs: bool
    is_recorded: bool
    gradient_scale: float

    @property
    def values(self) -> tuple[Any, ...]:
        """Everything that the user gave."""
        return (*self.args, *self.kwargs.values(), self.target)

    @property
    def named(self) -> dict[str, Any]:
        """Everything that the user gave, by the names that errors have for it."""
        positional = {f"argument {number}": value for number, value in enumerate(self.args)}
        return positional | self.kwargs | {"target": self.target}

    def describe(self, needs_target: bool) -> BatchFacts:
        """What the other ranks are told of it."""
        return describe_batch(
            self.args,
            self.kwargs,
            self.target,
            microbatches=self.microbatches,
            is_training=self.is_training,
            needs_target=needs_target,
        )

    def split(
        self,
        rows: Rows,
        accepted: Mapping[int, Accepted],
        reduction: Reduction,
        needs_target: bool,
    ) -> Microbatches:
        """Split the batch into this rank's microbatches; `accepted` is what each stage takes."""
        count, aliases = len(rows.rows), Aliases()
        columns = [split_batch(value, count, aliases) for value in self.args]
        targets = [] if self.target is None else split_batch(self.target, count, aliases)
        return Microbatches(
            args=list(zip(*columns, strict=True)) if columns else [()] * count,
            kwargs=split_keywords(self.kwargs, accepted, count, aliases),
            targets=targets or ([] if needs_target else [None] * count),
            loss_weights=weigh_losses(reduction, targets, rows.rows),
            row_weights=weigh_rows(rows.rows),
            gradient_scale=self.gradient_scale,
            keeps_outputs=self.keeps_outputs,
        )
