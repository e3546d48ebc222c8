"""Marks on the gradients of a stage, which show whether a loss ran a backward and undid it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.errors import PipelineError

__all__ = ["GradientMarks", "mark_gradients"]


@dataclass(frozen=True, slots=True, eq=False)
class GradientMarks:
    """The gradients of a stage's parameters before a loss ran, with their versions.

    `inputs` has the tensors that the stage received, by producer.
    """

    parameters: Sequence[torch.Tensor]
    inputs: Sequence[Sequence[torch.Tensor]]
    before: Sequence[tuple[torch.Tensor | None, int]]

    def compare(self) -> None:
        """Refuse a loss that ran a backward of its own and removed its gradients here.

        Gradients that it leaves in `.grad` are kept, and also reach the stages before this one, as
        in the unsplit model. Gradients that it removes here cannot be removed there.
        """
        if all(leaf.grad is None for group in self.inputs for leaf in group):
            return
        after = _gradients_of(self.parameters)
        if all(a is b and m == n for (a, m), (b, n) in zip(after, self.before, strict=True)):
            raise PipelineError(
                "the loss ran a backward through earlier stages and removed its gradients in the "
                "last stage only; use torch.autograd.grad, or backward(inputs=[...]) with the "
                "parameters of the last stage"
            )


def mark_gradients(
    parameters: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]]
) -> GradientMarks:
    """Return marks to compare after the loss has run."""
    return GradientMarks(parameters, inputs, _gradients_of(parameters))


def _gradients_of(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor | None, int]]:
    gradients = [parameter.grad for parameter in parameters]
    return [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]
