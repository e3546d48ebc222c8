"""In most steps a loss is as it was before, and is looked at just enough to see that."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from penstock.errors import BatchError
from penstock.loss.labels import BatchLabels
from penstock.loss.memory import LossMemory
from penstock.loss.probe import ComparedWeights
from penstock.loss.steady_weights import weigh_steadily
from penstock.loss.term_weights import Given
from penstock.loss.weigher import Weigher

ROWS = (3, 2, 2, 1)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_weights(memory: LossMemory, targets: list[torch.Tensor]) -> Weigher:
    labels = BatchLabels({"target": targets})
    given = Given(
        ROWS,
        labels,
        None,
        None,
        adds_up=False,
        makes_own=False,
        is_training=True,
        names=("target",),
    )
    return weigh_steadily(ComparedWeights(memory, given, dims=[0], merge=None))


def run_step(
    memory: LossMemory,
    *losses: Loss,
    label: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
) -> tuple[Weigher, list[float]]:
    """Weigh one step; the last loss is that of all microbatches that are left."""
    generator = torch.Generator().manual_seed(0)
    targets = [label(torch.randn(rows, 5, generator=generator)) for rows in ROWS]
    weights = make_weights(memory, targets)
    found = []
    for number, target in enumerate(targets):
        output = torch.randn(len(target), 5, generator=generator).requires_grad_() * 1
        loss = losses[min(number, len(losses) - 1)]
        made = weights.make_loss(loss, number, output, target)
        found.append(weights.weigh(number, made).weight)
    weights.check()
    return weights, found


def with_penalty(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target) + output.square().mean()


def test_only_every_step_that_is_a_power_of_two_is_looked_at_closely() -> None:
    memory = LossMemory()
    steps = [run_step(memory, functional.mse_loss) for _ in range(8)]
    closely = [isinstance(weights, ComparedWeights) for weights, _ in steps]
    assert closely == [True, True, False, True, False, False, False, True]
    assert [found for _, found in steps] == [pytest.approx([3 / 8, 2 / 8, 2 / 8, 1 / 8])] * 8


def test_a_loss_that_changes_within_a_steady_step_is_refused() -> None:
    memory = LossMemory()
    for _ in range(4):
        run_step(memory, functional.mse_loss)
    with pytest.raises(BatchError, match="must count alike in all microbatches"):
        run_step(memory, functional.mse_loss, functional.mse_loss, with_penalty)
    assert run_step(memory, functional.mse_loss)[1] == pytest.approx([3 / 8, 2 / 8, 2 / 8, 1 / 8])


def test_a_loss_that_changes_with_a_steady_step_is_looked_at_again() -> None:
    memory = LossMemory()
    for _ in range(4):
        run_step(memory, functional.mse_loss)
    weights, found = run_step(memory, with_penalty)
    assert not isinstance(weights, ComparedWeights)
    assert found == pytest.approx([3 / 8, 2 / 8, 2 / 8, 1 / 8])


def test_what_a_steady_loss_counts_is_compared_with_the_labels() -> None:
    # The graph is the same with other labels, so that only the count shows the change.
    def classes_of(target: torch.Tensor) -> torch.Tensor:
        return target.argmax(1)

    def usual(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target)

    def ignoring(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target.where(target != target[0], -100))

    memory = LossMemory()
    for _ in range(4):
        run_step(memory, usual, label=classes_of)
    with pytest.raises(BatchError, match="must count what the labels of the step say"):
        run_step(memory, usual, ignoring, label=classes_of)
