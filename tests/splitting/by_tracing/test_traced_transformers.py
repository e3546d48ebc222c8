"""Models of the transformers library, traced and cut by work."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from penstock.splitting.by_tracing.capture.capture import capture
from penstock.splitting.by_tracing.traced import split_traced
from penstock.splitting.output_loss import find_loss
from penstock.training.pipeline import Pipeline

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    model: nn.Module = transformers.LlamaForCausalLM(config)
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


def make_batch(rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(3, 32, (rows, 6), generator=generator)
        for name in ("input_ids", "labels")
    }


@pytest.mark.parametrize("schedule", [pytest.param("1F1B", marks=pytest.mark.slow), "ZBV"])
@pytest.mark.parametrize("make", [make_llama, make_t5])
def test_a_pipeline_of_traced_stages_trains_like_the_model(make: Any, schedule: str) -> None:
    torch.manual_seed(0)
    model = make().double()
    plain = copy.deepcopy(model)
    batch = make_batch(8)
    pipe = split_traced(model, (), {name: rows[:2] for name, rows in batch.items()}, stages=4)
    assert set(pipe.state_dict()) == set(model.state_dict())
    assert len(pipe.ties) == 1
    step = Pipeline(pipe, schedule, microbatches=4, loss=find_loss).step(**batch)
    loss = plain(**batch).loss
    loss.backward()
    assert step.loss == pytest.approx(loss.item())
    torch.testing.assert_close(
        {name: p.grad for name, p in model.named_parameters()},
        {name: p.grad for name, p in plain.named_parameters()},
        rtol=1e-5,
        atol=1e-7,
    )


def test_lengths_and_batches_may_vary_except_where_the_model_checks_them() -> None:
    entry = capture(make_llama(), (), make_batch(4), dynamic=True).entry
    for shape in ((2, 3), (7, 16)):
        ids = torch.ones(shape, dtype=torch.int64)
        assert len(entry.take((), {"input_ids": ids, "labels": ids})) == 2
