"""One step as the user asked for it: described for other ranks, and split into microbatches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.loss.labels import LABELS
from penstock.loss.reduction import weigh_rows
from penstock.loss.weigher import Weigher
from penstock.step.microbatches import split_batch
from penstock.step.step_data import Microbatches
from penstock.tensors.aliases import Aliases
from penstock.training.batch.agreement import Agreed
from penstock.training.batch.batch import Accepted, BatchFacts, deal_keywords, describe_batch

__all__ = ["StepRequest"]


@dataclass(frozen=True, slots=True)
class StepRequest:
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
        """Everything that the user gave, by the names that errors use."""
        positional = {f"argument {number}": value for number, value in enumerate(self.args)}
        return positional | self.kwargs | {"target": self.target}

    @property
    def form(self) -> tuple[object, ...] | None:
        """All that its description depends on, if it was given nothing but plain tensors."""
        forms: list[tuple[torch.Size, torch.dtype] | None] = []
        for value in self.values:
            if type(value) is torch.Tensor:
                forms.append((value.shape, value.dtype))
            elif value is None:
                forms.append(None)
            else:
                return None
        context = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        names = len(self.args), *self.kwargs
        return tuple(forms), names, self.microbatches, self.is_training, context

    def describe(self, *, needs_target: bool, uses_target: bool) -> BatchFacts:
        """Describe it for the other ranks."""
        return describe_batch(
            self.args,
            self.kwargs,
            self.target,
            microbatches=self.microbatches,
            is_training=self.is_training,
            needs_target=needs_target,
            uses_target=uses_target,
        )

    def split_labels(self, microbatches: int) -> list[Any] | None:
        """Split the labels from which a model computes its own loss, if given on this rank."""
        labels = self.kwargs.get(LABELS)
        return None if labels is None else split_batch(labels, microbatches)

    def split(
        self,
        agreed: Agreed,
        accepted: Mapping[int, Accepted],
        weigh: Callable[[Mapping[str, Sequence[Any]]], Weigher],
        needs_target: bool,
    ) -> Microbatches:
        """Split the batch into this rank's microbatches; `accepted` is what each stage takes.

        `weigh` gets the arguments by name, one value per microbatch.
        """
        count, aliases = len(agreed.rows.rows), Aliases()
        args = [split_batch(value, count, aliases) for value in self.args]
        kwargs = {k: split_batch(value, count, aliases) for k, value in self.kwargs.items()}
        targets = [] if self.target is None else split_batch(self.target, count, aliases)
        named = {"target": targets} if targets else {}
        named |= kwargs | {f"argument {number}": column for number, column in enumerate(args)}
        return Microbatches(
            args=list(zip(*args, strict=True)) if args else [()] * count,
            kwargs=deal_keywords(kwargs, accepted, count),
            targets=targets or ([] if needs_target else [None] * count),
            weigher=weigh(named),
            row_weights=weigh_rows(agreed.rows.rows),
            gradient_scale=self.gradient_scale,
            keeps_outputs=self.keeps_outputs,
        )
