"""Calls of a model run its pipeline: what becomes of losses, gradients, outputs and optimizers."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ArgumentError, PeerLostError, PipelineError
from penstock.integrations.calls import PipelineCalls, train_by_calls
from penstock.integrations.layout import Layout, PipelineConfig, find_layout
from penstock.integrations.pretrained import load_pretrained
from tests.alive.fault_ranks import run_ranks
from tests.processes import Processes
from tests.splitting.zoo import ZOO

WORDS = torch.arange(32).reshape(4, 8) % 60
CPU = torch.device("cpu")
LAYOUT = Layout(2, 1, 0, None)


def make_model() -> Any:
    return ZOO["Llama, tied head"].build().model


def make_calls(model: nn.Module, **settings: Any) -> PipelineCalls:
    config = PipelineConfig("1F1B", microbatches=2, ranks=2)
    return train_by_calls(model, config, LAYOUT, CPU, seed=0, **settings)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_are_those_of_whatever_is_made_of_the_losses() -> None:
    model = make_model()
    plain = deepcopy(model)
    make_calls(model)
    for one in (plain, model):
        # Two losses are joined, of a third only the value is used, and .grad has something.
        one(input_ids=WORDS, labels=WORDS).loss.backward()
        first = one(input_ids=WORDS, labels=WORDS).loss
        second = one(input_ids=WORDS.flip(0), labels=WORDS.flip(1)).loss
        value = one(input_ids=WORDS[:2], labels=WORDS[:2]).loss.detach()
        (first * second.square() * value).backward()
    # The model computes its loss in single precision.
    torch.testing.assert_close(gradients_of(model), gradients_of(plain), rtol=1e-4, atol=1e-4)


def test_a_loss_is_differentiated_once() -> None:
    model = make_model()
    make_calls(model)
    loss = model(input_ids=WORDS, labels=WORDS).loss
    loss.backward(retain_graph=True)
    with pytest.raises(PipelineError, match="a loss is differentiated once"):
        loss.backward()


def test_a_step_that_fails_leaves_gradients_unchanged() -> None:
    model = make_model()
    make_calls(model)
    model(input_ids=WORDS, labels=WORDS).loss.backward()
    before = deepcopy(gradients_of(model))
    with pytest.raises(RuntimeError, match="out of range"):
        model(input_ids=WORDS + 1000, labels=WORDS)
    torch.testing.assert_close(gradients_of(model), before)


def test_outputs_are_there_if_they_are_shared() -> None:
    model = make_model()
    with torch.no_grad():
        expected = model(input_ids=WORDS, labels=WORDS)
    calls = make_calls(model, share_outputs=True)
    with torch.inference_mode():
        found = model(input_ids=WORDS, labels=WORDS)
        torch.testing.assert_close(found.logits, expected.logits)
        assert float(found.loss) == pytest.approx(float(expected.loss))
        assert found[0] is found["loss"] is found.loss
        # Without labels there is no loss, and the model's own output is returned.
        torch.testing.assert_close(model(input_ids=WORDS).logits, expected.logits)
    calls.remove()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=WORDS).logits, expected.logits)


def test_outputs_that_stay_elsewhere_are_refused() -> None:
    model = make_model()
    make_calls(model)
    with pytest.raises(PipelineError, match="give share_outputs=True"):
        _ = model(input_ids=WORDS, labels=WORDS).logits
    with torch.no_grad(), pytest.raises(PipelineError, match="without labels has no loss"):
        model(input_ids=WORDS)


def test_a_target_belongs_to_a_loss_function() -> None:
    # A step as it was without a pipeline computes its loss from what the model returns.
    plain, model, other = make_model(), make_model(), make_model()
    make_calls(model, loss=squares, reduction="sum")
    with pytest.raises(ArgumentError, match=r"got the keywords \['input_ids'\]"):
        model(input_ids=WORDS)
    target = torch.ones(4, 8)
    for one in (squares(plain(input_ids=WORDS), target), model(WORDS, target=target).loss):
        one.backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain), rtol=1e-4, atol=1e-4)
    make_calls(other)
    with pytest.raises(ArgumentError, match="needs a loss function to give it to"):
        other(input_ids=WORDS, target=target)


def squares(output: Any, target: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (output.logits.mean(-1) - target).square().sum()
    return result


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model = make_model()
    calls = make_calls(model)
    beside = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), beside], lr=0.1)
    with pytest.raises(ArgumentError, match=r"got one of shape \(3,\) from elsewhere"):
        calls.keep_own_parameters(optimizer)


def test_a_model_without_memory_is_loaded_by_the_ranks_and_trained(tmp_path: Path) -> None:
    plain = make_model()
    plain.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = make_calls(model)
    calls.keep_own_parameters(optimizer)
    load_pretrained(calls.pipeline, tmp_path)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for one, step in ((plain, other), (model, optimizer)):
        one(input_ids=WORDS, labels=WORDS).loss.backward()
        step.step()
    found = calls.pipeline.full_state_dict()
    torch.testing.assert_close(found, dict(plain.state_dict()))


def scale_by_replica(rank: int, factors: tuple[float, float]) -> str:
    """Return what the backward raises, or where gradients differ from their mean over replicas."""
    model = make_model()
    plain = deepcopy(model)
    config = PipelineConfig("1F1B", microbatches=2, ranks=1)
    calls = train_by_calls(model, config, find_layout(config, CPU), CPU, seed=0)
    rows = [WORDS, WORDS.flip(1)]
    loss = model(input_ids=rows[rank], labels=rows[rank]).loss
    try:
        (factors[rank] * loss).backward()
    except PipelineError as error:
        return str(error)
    for own, factor in zip(rows, factors, strict=True):
        (factor / 2 * plain(input_ids=own, labels=own).loss).backward()
    found = gradients_of(model)
    torch.testing.assert_close(found, gradients_of(plain), rtol=1e-4, atol=1e-4)
    calls.remove()
    return "equal"


def test_replicas_must_scale_their_losses_alike(two_processes: Processes) -> None:
    # Gradients had been averaged before each replica multiplied them by its own factor, so that
    # replicas continued with different weights.
    assert two_processes.run(scale_by_replica, (3.0, 3.0)) == ["equal", "equal"]
    refused = two_processes.run(scale_by_replica, (1.0, 3.0))
    assert [text.split(";")[0] for text in refused] == [
        "replicas must multiply their losses by the same factor, since gradients are means over "
        "them when a backward begins (got 1.0 and 3.0)"
    ] * 2


def leave_out_a_backward(rank: int) -> str:
    """Differentiate a loss in the first replica only; return what the next call raises."""
    model = make_model()
    config = PipelineConfig("1F1B", microbatches=2, ranks=1)
    calls = train_by_calls(model, config, find_layout(config, CPU), CPU, seed=0)
    loss = model(input_ids=WORDS, labels=WORDS).loss
    try:
        if rank == 0:
            loss.backward()
        model(input_ids=WORDS, labels=WORDS)
    except PipelineError as error:
        return str(error)
    finally:
        calls.remove()
    return "nothing"


def test_replicas_that_leave_out_a_backward_are_named(two_processes: Processes) -> None:
    # The one in its backward waited for torch's timeout, or took messages of the other's next step
    # for its own, since both used the connections of DDP.
    said = (
        "replicas must differentiate the losses of the same calls (got a backward in replica 0, "
        "a call of the model in replica 1); let all of them call backward, or none"
    )
    assert two_processes.run(leave_out_a_backward) == [said] * 2


def end_before_a_backward(rank: int) -> None:
    """End the second replica before its backward, as a program does that is killed."""
    model = make_model()
    config = PipelineConfig("1F1B", microbatches=2, ranks=1)
    train_by_calls(model, config, find_layout(config, CPU), CPU, seed=0)
    loss = model(input_ids=WORDS, labels=WORDS).loss
    if rank == 1:
        os._exit(4)
    loss.backward()


@pytest.mark.slow
def test_replica_that_is_lost_before_its_backward_is_named(tmp_path: Path) -> None:
    # Replicas met in a collective that nobody guarded.
    left, lost = run_ranks(end_before_a_backward, 2, tmp_path)
    assert (left.exit_code, lost.exit_code) == (1, 4)
    assert isinstance(left.reported, PeerLostError), left
    assert left.reported.rank == 1
    assert "ended (its connection broke)" in str(left.reported)
