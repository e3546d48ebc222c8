from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import PipelineError
from penstock.training.loss_function import takes_target
from penstock.training.pipeline import Pipeline
from tests.models import gradients_of, make_batch, make_blocks, make_stages, run_reference
from tests.processes import Processes


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
    result = pipeline.evaluate(torch.randn(4, 4, dtype=torch.float64))
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


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_with_one_element_counts_once(shape: tuple[int, ...]) -> None:
    # A loss of shape [1] was counted as often as there are microbatches, in eval too.
    batch, target = make_batch()
    blocks = make_blocks()
    expected = run_reference(blocks, batch, target)
    model = nn.Sequential(*blocks)
    pipeline = Pipeline(
        make_stages("1F1B", 2, blocks),
        "1F1B",
        microbatches=4,
        loss=lambda output, wanted: mean(output, wanted).reshape(shape),
    )
    assert pipeline.step(batch, target=target).loss == pytest.approx(expected.loss, rel=1e-12)
    assert pipeline.evaluate(batch, target=target).loss == pytest.approx(expected.loss, rel=1e-12)
    found = gradients_of(model.named_parameters())
    torch.testing.assert_close(found, expected.gradients, rtol=1e-12, atol=1e-14)


def unreduced(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target, reduction="none")


def detached(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mean(output, target).detach()


def integer(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mean(output, target).long()


def number(output: torch.Tensor, target: torch.Tensor) -> float:
    return mean(output, target).item()


def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mean(output, target), output


def named(output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": mean(output, target)}


def nothing(_output: torch.Tensor, _target: torch.Tensor) -> None:
    return None


class SwitchedLoss:
    """Returns something else than a loss until it is switched."""

    def __init__(self, wrong: Callable[..., Any]) -> None:
        self.compute: Callable[..., Any] = wrong

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        return self.compute(output, target)


def train_after_wrong_losses(
    rank: int, family: str
) -> tuple[list[str], float | None, dict[str, torch.Tensor]]:
    """Return the errors of steps with wrong losses, then loss and gradients of a right one."""
    del rank
    blocks = make_blocks()
    model = nn.Sequential(*blocks)
    loss = SwitchedLoss(mean)
    pipeline = ps.Pipeline(
        make_stages(family, 2, blocks), family, microbatches=4, loss=loss, group=dist.group.WORLD
    )
    batch, target = make_batch()
    messages = []
    for wrong in (unreduced, detached, integer, number, pair, named, nothing):
        loss.compute = wrong
        with pytest.raises(ps.errors.PipelineError) as caught:
            pipeline.step(batch, target=target)
        messages.append(str(caught.value).splitlines()[0])
        loss.compute = mean
        pipeline.step(batch, target=target)
    model.zero_grad()
    result = pipeline.step(batch, target=target)
    return messages, result.loss, gradients_of(model.named_parameters())


@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("1F1B", "rank 1, stage 1, microbatch 0, 1F0"),
        ("ZBV", "rank 0, stage 3, microbatch 0, 3F0"),
    ],
)
def test_a_wrong_loss_fails_on_every_rank_alike_and_the_next_step_works(
    two_processes: Processes, family: str, place: str
) -> None:
    # The last rank alone had an error, or none; the others waited ten seconds for a lost rank.
    everyone = two_processes.run(train_after_wrong_losses, family)
    kinds = [
        "must be one real number (got a Tensor of shape (4, 16), torch.float64",
        "of a training step must have a graph (got a Tensor of shape (), torch.float64",
        "must be one real number (got a Tensor of shape (), torch.int64",
        "must be one real number (got the float ",
        "must be one real number (got a tuple of 2); return the sum",
        "must be one real number (got a dict with loss); return its 'loss'",
        "must be one real number (got None); return the loss",
    ]
    expected = run_reference(make_blocks(), *make_batch())
    for messages, loss, found in everyone:
        assert messages == everyone[0][0]
        for message, kind in zip(messages, kinds, strict=True):
            assert message.startswith(f"{place}: PipelineError: the loss {kind}")
        assert loss == pytest.approx(expected.loss, rel=1e-12)
        known = {name: expected.gradients[name] for name in found}
        torch.testing.assert_close(found, known, rtol=1e-12, atol=1e-14)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "torch.no_grad()": torch.no_grad,
    "torch.inference_mode()": torch.inference_mode,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_step_without_gradient_recording_is_refused_but_evaluate_works(name: str) -> None:
    # It returned a loss, and no gradients.
    batch, target = make_batch()
    blocks = make_blocks()
    pipeline = Pipeline(make_stages("ZBV", 2, blocks), "ZBV", microbatches=4, loss=mean)
    expected = run_reference(blocks, batch, target)
    with CONTEXTS[name]():
        with pytest.raises(PipelineError) as caught:
            pipeline.step(batch, target=target)
        assert pipeline.evaluate(batch, target=target).loss == pytest.approx(expected.loss)
    assert str(caught.value) == (
        f"step must run where gradients are recorded (rank 0 calls it under {name}); leave that "
        "context, or call evaluate"
    )
    assert pipeline.step(batch, target=target).loss == pytest.approx(expected.loss)


def step_in_contexts(rank: int, name: str) -> tuple[str, list[float | None]]:
    """Return the error of a step that rank 1 alone calls in a context, and later losses."""
    pipeline = ps.Pipeline(
        make_stages("1F1B", 2, make_blocks()),
        "1F1B",
        microbatches=4,
        loss=mean,
        group=dist.group.WORLD,
    )
    batch, target = make_batch()
    losses = [pipeline.step(batch, target=target).loss]
    with CONTEXTS[name]() if rank == 1 else nullcontext(), pytest.raises(PipelineError) as caught:
        pipeline.step(batch, target=target)
    with CONTEXTS[name]():
        losses.append(pipeline.evaluate(batch, target=target).loss)
    losses.append(pipeline.step(batch, target=target).loss)
    return str(caught.value), losses


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_on_one_rank_is_refused_on_all(two_processes: Processes, name: str) -> None:
    everyone = two_processes.run(step_in_contexts, name)
    loss = run_reference(make_blocks(), *make_batch()).loss
    message = (
        f"step must run where gradients are recorded (rank 1 calls it under {name}); leave that "
        "context, or call evaluate"
    )
    assert everyone == [(message, [pytest.approx(loss)] * 3)] * 2
