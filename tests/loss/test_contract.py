"""What is accepted as a loss."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.loss.contract import require_graph, require_number


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_of_any_shape_becomes_a_loss_without_dimensions(shape: tuple[int, ...]) -> None:
    number = require_number(torch.full(shape, 2.0, requires_grad=True))
    assert (number.shape, number.item(), number.requires_grad) == ((), 2.0, True)


@pytest.mark.parametrize(
    ("loss", "got", "advice"),
    [
        (
            torch.ones(3),
            "a Tensor of shape (3,), torch.float32, requires_grad=False",
            "return loss.mean(), or loss.sum() with Pipeline(reduction='sum')",
        ),
        (
            torch.ones(0),
            "a Tensor of shape (0,), torch.float32, requires_grad=False",
            "return loss.mean(), or loss.sum() with Pipeline(reduction='sum')",
        ),
        (
            torch.tensor(3),
            "a Tensor of shape (), torch.int64, requires_grad=False",
            "return a floating point tensor that is computed from the output of the model",
        ),
        (
            torch.tensor(True),
            "a Tensor of shape (), torch.bool, requires_grad=False",
            "return a floating point tensor that is computed from the output of the model",
        ),
        (
            torch.tensor(1j),
            "a Tensor of shape (), torch.complex64, requires_grad=False",
            "return its real part or its absolute value",
        ),
        (
            torch.ones(1).to_sparse(),
            "a Tensor of shape (1,), torch.float32, requires_grad=False",
            "return it as a dense tensor: loss.to_dense().sum()",
        ),
        (0.5, "the float 0.5", "return the tensor itself, without .item() or float()"),
        (
            None,
            "None",
            "return the loss from the loss function (a model that computes its own loss needs its "
            "labels)",
        ),
        (
            (torch.ones(()), 1),
            "a tuple of 2",
            "return the sum of those that are to be trained, as one tensor",
        ),
        (
            [torch.ones(())],
            "a list of 1",
            "return the sum of those that are to be trained, as one tensor",
        ),
        (
            {"a": 1, "b": 2},
            "a dict with a, b",
            "return the sum of those that are to be trained, as one tensor",
        ),
        (
            OrderedDict(loss=1, logits=2),
            "a OrderedDict with loss, logits",
            "return its 'loss', as loss=penstock.find_loss does",
        ),
        (
            SimpleNamespace(loss=1),
            "a SimpleNamespace",
            "return its .loss, as loss=penstock.find_loss does",
        ),
        (nn.MSELoss(), "a MSELoss", "return what it computes"),
        ("1.0", "a str", "return a tensor that is computed from the output of the model"),
    ],
)
def test_any_other_loss_is_refused_with_advice(loss: object, got: str, advice: str) -> None:
    with pytest.raises(PipelineError) as caught:
        require_number(loss)
    assert str(caught.value) == f"the loss must be one real number (got {got}); {advice}"


def test_a_loss_with_a_graph_is_accepted() -> None:
    require_graph(torch.ones((), requires_grad=True), None, nn.Linear(1, 1))


GOT = "(got a Tensor of shape (), torch.float32, requires_grad=False)"


def test_a_detached_loss_is_refused() -> None:
    with pytest.raises(PipelineError) as caught:
        require_graph(torch.ones(()), {"h": torch.ones(2)}, nn.Linear(1, 1))
    assert str(caught.value) == (
        f"the loss of a training step must have a graph {GOT}; compute it from the output of the "
        "model, without detach, .data, .item or no_grad on the way"
    )


def test_a_loss_without_trainable_parameters_is_refused() -> None:
    frozen = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(PipelineError) as caught:
        require_graph(torch.ones(()), torch.ones(2), frozen)
    assert str(caught.value) == (
        f"the loss of a training step must have a graph {GOT}; no parameter of the last stage is "
        "trainable, and what the stage receives requires no gradient: unfreeze a parameter that "
        "the loss depends on, or call evaluate"
    )
    with pytest.raises(PipelineError, match="without detach"):
        require_graph(torch.ones(()), torch.ones(2, requires_grad=True), frozen)
