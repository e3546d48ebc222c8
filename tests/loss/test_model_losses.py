"""Models of the transformers library that compute their own loss, by default that of the batch."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from tests.processes import Processes

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
BERT = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# The number of labels that count in each row; the second microbatch has none.
VALID = [1, 6, 0, 0, 3, 5, 2, 6]


def double_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: object
) -> torch.Tensor:
    """Compute the loss of causal models as transformers do, but in float64."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return nn.functional.cross_entropy(logits.view(-1, vocab_size), shifted.reshape(-1))


def make_llama() -> nn.Module:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.LlamaConfig(**SIZES, **tokens, num_key_value_heads=1, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    model.loss_function = double_loss
    causal: nn.Module = model
    return causal


def make_masked() -> nn.Module:
    model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**BERT))
    return model


def make_classifier() -> nn.Module:
    config = transformers.BertConfig(**BERT, num_labels=3)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def make_answering() -> nn.Module:
    model: nn.Module = transformers.BertForQuestionAnswering(transformers.BertConfig(**BERT))
    return model


def make_t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


LAYERS: dict[Callable[[], nn.Module], Any] = {
    make_llama: "model.layers",
    make_masked: "bert.encoder.layer",
    make_classifier: "bert.encoder.layer",
    make_answering: "bert.encoder.layer",
    make_t5: ["encoder.block", "decoder.block"],
}


def make_inputs(make: Callable[[], nn.Module]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 32, (8, 6), generator=generator)
    if make is make_classifier:
        return {"input_ids": tokens, "labels": torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])}
    if make is make_answering:
        # Positions from six on are ignored; start and end positions differ in which are.
        return {
            "input_ids": tokens,
            "start_positions": torch.tensor([0, 1, 6, 9, 9, 9, 2, 3]),
            "end_positions": torch.tensor([0, 9, 6, 9, 1, 9, 2, 3]),
        }
    labels = tokens.clone()
    for row, count in enumerate(VALID):
        labels[row, count:] = -100
    return {"input_ids": tokens, "labels": labels}


def make_model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def split(model: nn.Module, make: Callable[[], nn.Module], how: str) -> ps.Pipe:
    example = {name: value[:2] for name, value in make_inputs(make).items()}
    layers = LAYERS[make] if how == "layers" else None
    return ps.split(model, layers=layers, stages=4, example=(), example_kwargs=example)


def run_unsplit(model: nn.Module, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    plain = deepcopy(model)
    loss = plain(**inputs).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}


# Microbatches were weighted by rows: 4.118 instead of 4.150, and NaN if no label counts.
@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
@pytest.mark.parametrize("how", ["layers", pytest.param("traced", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make",
    [
        make_llama,
        pytest.param(make_masked, marks=pytest.mark.slow),
        pytest.param(make_classifier, marks=pytest.mark.slow),
        make_answering,
        pytest.param(make_t5, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_the_unsplit_model(
    make: Callable[[], nn.Module], how: str, family: str
) -> None:
    model, inputs = make_model(make), make_inputs(make)
    expected, gradients = run_unsplit(model, inputs)
    ranks = 4 if family == "1F1B" else 2
    pipe = split(model, make, how)
    pipeline = ps.Pipeline(pipe, family, ranks=ranks, microbatches=4, loss=ps.find_loss)
    for _ in range(3):
        model.zero_grad()
        assert pipeline.step(**inputs).loss == pytest.approx(expected, rel=1e-10)
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(found, gradients, rtol=1e-10, atol=1e-12)
    evaluated = pipeline.evaluate(**inputs, return_outputs=False)
    assert evaluated.loss == pytest.approx(expected, rel=1e-10)


def test_losses_add_up_if_the_model_gets_the_count_of_the_batch() -> None:
    # With num_items_in_batch a model returns its part of the sum, which was averaged again.
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    inputs = make_inputs(make_llama)
    expected, _ = run_unsplit(model, inputs)
    pipe = ps.split(model, layers="model.layers", stages=2)
    pipeline = ps.Pipeline(pipe, "1F1B", microbatches=4, loss=ps.find_loss)
    count = int((inputs["labels"][:, 1:] != -100).sum())
    found = pipeline.step(**inputs, num_items_in_batch=count).loss
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_reduction_counts_the_labels_if_there_is_no_target() -> None:
    # A function was ignored if there was no target.
    model, inputs = make_model(make_llama), make_inputs(make_llama)
    expected, _ = run_unsplit(model, inputs)
    pipe = ps.split(model, layers="model.layers", stages=2)
    pipeline = ps.Pipeline(
        pipe, "1F1B", microbatches=4, loss=ps.find_loss, reduction=count_next_tokens
    )
    assert pipeline.step(**inputs).loss == pytest.approx(expected, rel=1e-12)


def test_a_reduction_with_nothing_to_count_is_refused() -> None:
    model = make_model(make_answering)
    pipe = ps.split(model, layers="bert.encoder.layer", stages=2)
    pipeline = ps.Pipeline(pipe, "1F1B", microbatches=4, loss=ps.find_loss, reduction=len)
    with pytest.raises(ps.errors.PipelineError, match="needs something to count"):
        pipeline.step(**make_inputs(make_answering))


def test_a_target_that_the_loss_does_not_take_is_refused() -> None:
    pipe = ps.split(make_model(make_llama), layers="model.layers", stages=2)
    pipeline = ps.Pipeline(pipe, "1F1B", microbatches=4, loss=ps.find_loss)
    inputs = make_inputs(make_llama)
    with pytest.raises(ps.errors.BatchError, match="target must be left out"):
        pipeline.step(**inputs, target=inputs["labels"])


def train_with_labels_on(
    rank: int, labelled: list[int], family: str, reduction: Any
) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    """Return losses and gradients of steps for which only some ranks get the batch."""
    model, inputs = make_model(make_llama), make_inputs(make_llama)
    stages = 4 if family == "ZBV" else 2
    pipe = ps.split(model, layers="model.layers", stages=stages)
    pipeline = ps.Pipeline(
        pipe,
        family,
        microbatches=4,
        loss=ps.find_loss,
        group=dist.group.WORLD,
        reduction=reduction,
    )
    own = inputs if rank in labelled else {}
    losses = []
    for _ in range(3):
        model.zero_grad()
        losses.append(pipeline.step(**own).loss)
    losses.append(pipeline.evaluate(**own, return_outputs=False).loss)
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def count_next_tokens(labels: torch.Tensor) -> float:
    return float((labels[:, 1:] != -100).sum())


@pytest.mark.parametrize(
    ("labelled", "family", "reduction"),
    [
        ([0, 1], "1F1B", "auto"),
        ([0], "1F1B", "auto"),
        ([0], "1F1B", count_next_tokens),
        ([0], "ZBV", "auto"),
    ],
)
def test_over_processes_labels_may_be_on_the_first_rank_alone(
    two_processes: Processes, labelled: list[int], family: str, reduction: Any
) -> None:
    expected, gradients = run_unsplit(make_model(make_llama), make_inputs(make_llama))
    everyone = two_processes.run(train_with_labels_on, labelled, family, reduction)
    for losses, found in everyone:
        assert losses == [pytest.approx(expected, rel=1e-10)] * 4
        known = {name: gradients[name] for name in found}
        torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)
    assert {name for _, found in everyone for name in found} == set(gradients)
