"""Models that make a cache of keys and values by default run in stages without one."""

import logging
from typing import Any

import pytest
import torch
import transformers as hf

import penstock as ps
from penstock.errors import ModelError
from penstock.splitting.caches import find_configs, without_cache
from tests.splitting.zoo import SIZES

IDS = torch.arange(32).reshape(4, 8) % 19


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    kind: Any = hf.LlamaForCausalLM
    return kind(hf.LlamaConfig(**sizes)).double()


@pytest.mark.parametrize(
    "way",
    ["by layers", "with an example", pytest.param("traced", marks=pytest.mark.slow)],
)
def test_a_model_with_its_default_configuration_gives_its_own_outputs(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    # `use_cache=True` is what configurations say; the cache was a value of the last stage that
    # could not be kept, and what could came back as a dict with a loss per microbatch.
    model = llama()
    ways: dict[str, dict[str, Any]] = {
        "by layers": {"layers": "model.layers"},
        "with an example": {"layers": "model.layers", "example": [IDS]},
        "traced": {"example": [IDS], "example_kwargs": {"labels": IDS}},
    }
    with caplog.at_level(logging.WARNING, "penstock"):
        pipe = ps.split(model, stages=2, **ways[way])
        expected = model(IDS, labels=IDS)
        pipeline = ps.Pipeline(pipe, "1F1B", microbatches=2, loss=ps.find_loss)
        pipeline.step(IDS, labels=IDS)
        trained = pipeline.step(IDS, labels=IDS, return_outputs=True)
        evaluated = pipeline.evaluate(IDS, labels=IDS)
    for result in (trained, evaluated):
        assert type(result.outputs) is type(expected)
        assert list(result.outputs) == ["loss", "logits"]
        torch.testing.assert_close(result.outputs.logits, expected.logits, rtol=0, atol=1e-12)
        torch.testing.assert_close(result.outputs.loss, expected.loss, rtol=0, atol=1e-6)
        assert result.outputs.loss.item() == pytest.approx(result.loss, abs=1e-6)
    assert [record.message.partition(" of")[0] for record in caplog.records] == ["use_cache=True"]
    assert model.config.use_cache
    assert expected.past_key_values is not None


def test_a_cache_that_is_asked_for_is_refused() -> None:
    model = llama()
    pipe = ps.split(model, layers="model.layers", stages=2)
    with pytest.raises(ModelError, match="use_cache=True asks for a cache"):
        pipe(IDS, use_cache=True)
    with pytest.raises(ModelError, match="use_cache=True asks for a cache"):
        ps.split(
            model,
            layers="model.layers",
            stages=2,
            example=[IDS],
            example_kwargs={"use_cache": True},
        )


def test_configurations_are_restored_after_an_error() -> None:
    model = llama()
    with pytest.raises(ZeroDivisionError), without_cache(find_configs(model)):
        1 / model.config.use_cache  # an error, since it is False here
    assert model.config.use_cache


def test_nothing_is_logged_for_encoders(caplog: pytest.LogCaptureFixture) -> None:
    kind: Any = hf.BertForMaskedLM
    model = kind(hf.BertConfig(**{**SIZES, "num_hidden_layers": 2}))
    with caplog.at_level(logging.WARNING, "penstock"):
        ps.split(model, layers="bert.encoder.layer", stages=2)
    assert not caplog.records
