"""What a mean counts in targets."""

import pytest
import torch

from penstock.loss.calls import Elementwise, Labelled, Mean

LABELS = torch.tensor([[0, 1, -100], [-100, -100, -100], [2, 2, 7]])
WEIGHTS = torch.tensor([0.5, 2.0, 3.0])
MEANS = {
    "labels": Labelled(),
    "classes": Labelled(classes=3),
    "weights": Labelled(class_weights=WEIGHTS, classes=3),
    "elements": Elementwise(),
}
TARGETS = {
    "alike": list(LABELS),
    "uneven": [LABELS[0], LABELS[2, :2]],
    "single": list(LABELS[0]),
    "empty": [LABELS[0, :0], LABELS[1, :0]],
    "probabilities": [torch.ones(2, 3), torch.ones(4, 3)],
    "none": [],
}


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_targets_counted_together_have_the_counts_of_each(
    mean: Mean, targets: list[torch.Tensor]
) -> None:
    together = [float(count) for count in mean.count_each(targets)]
    assert together == [float(mean.count(target)) for target in targets]
