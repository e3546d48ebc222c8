"""What happens at the end of the model: the loss of a microbatch, and its output if it is kept."""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.loss.contract import require_graph, require_number
from penstock.loss.weigher import Share
from penstock.step.outputs import keep_output
from penstock.step.stage import Stage
from penstock.step.step_data import KeptLoss, LossFunction, Microbatches, Results

__all__ = ["ModelEnd", "keep_loss"]


@dataclass(frozen=True, slots=True)
class ModelEnd:
    """The loss function of a step, and whether its losses are trained on."""

    loss: LossFunction | None
    is_training: bool

    def finish(
        self, batch: Microbatches, results: Results, stage: Stage, microbatch: int, output: Any
    ) -> None:
        """Compute the loss of the last stage's output, and keep the output if asked to."""
        loss: torch.Tensor | None = None
        share: Share | None = None
        if self.loss is not None and batch.targets:
            marks = stage.mark_gradients(microbatch) if self.is_training else None
            target = batch.targets[microbatch]
            loss = batch.weigher.make_loss(self.loss, microbatch, output, target)
            if marks is not None:
                marks.compare()
            # A model that computes its own loss returns none where it is given no labels.
            if loss is not None or self.is_training or target is not None:
                number = require_number(loss)
                share = self._add_loss(batch, results, stage, microbatch, number, output)
        if batch.keeps_outputs:
            share = share or Share(batch.row_weights[microbatch])
            results.outputs[microbatch] = keep_output(output, loss, share)

    def _add_loss(
        self,
        batch: Microbatches,
        results: Results,
        stage: Stage,
        microbatch: int,
        loss: torch.Tensor,
        output: Any,
    ) -> Share:
        """Add a loss and its parts to the results, and to the roots of the backward."""
        share = batch.weigher.weigh(microbatch, loss)
        # A mean over nothing is NaN, and must not count.
        if share.weight == 0:
            return share
        if self.is_training:
            require_graph(loss, output, stage.module)
            stage.add_root(microbatch, loss, share.weight * batch.gradient_scale)
        results.losses.append((keep_loss(loss), share.weight))
        for part in share.parts:
            results.losses.append((keep_loss(part.value), part.weight))
            if part.edge is not None and self.is_training:
                weight = part.weight * batch.gradient_scale
                stage.add_root(microbatch, part.value, weight, part.edge)
        return share


def keep_loss(loss: torch.Tensor) -> KeptLoss:
    """Return the number of a loss, or a copy of one on a device, which nobody waits for.

    A copy, because a loss may be a view of a buffer as large as the output.
    """
    return loss.item() if loss.is_cpu else loss.detach().clone()
