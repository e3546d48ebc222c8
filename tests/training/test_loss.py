import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.training.loss import takes_target
from penstock.training.pipeline import Pipeline


class WithItsOwnLoss(nn.Module):
    """The last stage of a model that makes its own loss, if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(
        self, value: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor | None]:
        logits = self.head(value)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4, dtype=torch.float64), WithItsOwnLoss()]


def own_loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["loss"]


def test_a_model_with_its_own_loss_needs_no_target() -> None:
    batch, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    first, last = stages()
    expected = last(first(batch), labels=labels)["loss"]
    expected.backward()
    trained = stages()
    pipeline = Pipeline(trained, "1F1B", microbatches=3, loss=own_loss)
    result = pipeline.step(batch, labels=labels)
    assert result.loss == pytest.approx(expected.item(), abs=1e-14)
    reference = [parameter.grad for stage in (first, last) for parameter in stage.parameters()]
    found = [parameter.grad for stage in trained for parameter in stage.parameters()]
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-14)


def test_evaluation_without_labels_has_no_loss() -> None:
    pipeline = Pipeline(stages(), "1F1B", microbatches=2, loss=own_loss)
    result = pipeline.eval(torch.randn(4, 4, dtype=torch.float64))
    assert result.loss is None
    assert result.outputs["logits"].shape == (4, 3)


def test_training_without_a_loss_says_so() -> None:
    pipeline = Pipeline(stages(), "1F1B", microbatches=2, loss=own_loss)
    with pytest.raises(PipelineError, match=r"must be one real number \(got None\)"):
        pipeline.step(torch.randn(4, 4, dtype=torch.float64))


def test_only_a_function_of_one_parameter_takes_no_target() -> None:
    assert not takes_target(own_loss)
    assert takes_target(lambda output, target: output + target)
    assert takes_target(nn.CrossEntropyLoss())
    assert takes_target(lambda *values: values[0])
