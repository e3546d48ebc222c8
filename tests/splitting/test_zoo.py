"""Current architectures split by layers and by tracing, as the table in the documentation says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_layers.layers import split_layers
from tests.covering import all_but_slow
from tests.splitting import zoo
from tests.splitting.checking import assert_same_gradients, assert_same_names
from tests.splitting.zoo import ZOO, Species

# GPT-2 and traced stages have no plain linear layers, and a pipeline warns about that.
pytestmark = pytest.mark.filterwarnings("ignore:the backward of the stages")
TABLE = Path(__file__).parents[2] / "docs" / "models.md"


def row_of(species: Species) -> list[str]:
    start = f"| {species.name} |"
    (row,) = [line for line in TABLE.read_text().splitlines() if line.startswith(start)]
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def test_the_table_has_a_row_for_every_model() -> None:
    text = TABLE.read_text()
    assert text.startswith(zoo.HEADER)
    rows = text.removeprefix(zoo.HEADER).splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(ZOO)
    assert all(row_of(species)[1] == f"`{species.kind.__name__}`" for species in ZOO.values())


# One of each kind: plain, tied, mixed attention, experts, two towers, pictures, both of them.
FEW = ("GPT-2", "Llama, tied head", "Gemma 3", "Qwen3 MoE", "T5", "ViT", "LLaVA")


@pytest.mark.parametrize("name", all_but_slow(ZOO, FEW))
def test_every_model_splits_by_layers_as_the_table_says(name: str) -> None:
    species = ZOO[name]
    found = zoo.find_layers(species)
    assert found[:2] == ("yes", "yes")
    assert list(found) == row_of(species)[2:5]


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_model_is_traced_as_the_table_says(name: str) -> None:
    species = ZOO[name]
    assert zoo.describe_traced(species, 2) == row_of(species)[5]


def test_tied_heads_are_ties() -> None:
    for name in ("GPT-2", "Llama, tied head", "Gemma", "BERT", "T5", "BART"):
        example = ZOO[name].build()
        pipe = split_layers(example.model, example.lists, 4, (), example.kwargs)
        assert pipe.ties, name


# ---- options of real models


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("has_example", [False, True])
def test_gradient_checkpointing(is_reentrant: bool, has_example: bool) -> None:
    example = ZOO["Llama"].build()
    example.model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})  # type: ignore[operator]  # the library's method
    example.model.train()
    given = ((), example.kwargs) if has_example else ()
    pipe = split_layers(example.model, example.lists, 4, *given)
    assert_same_gradients(example.model, pipe, (), example.kwargs)


@pytest.mark.parametrize("layers", [None, [2, 3]])
@pytest.mark.parametrize("name", ["layers", "model.layers"])
def test_adapters_alone_are_trained(layers: list[int] | None, name: str) -> None:
    example = ZOO["Llama"].build()
    settings = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=layers,
        init_lora_weights=False,
    )
    model = get_peft_model(example.model, settings).double()
    for given in ((), ((), example.kwargs)):
        pipe = split_layers(model, [name], 4, *given)
        assert_same_names(model, pipe)
        assert_same_gradients(model, pipe, (), example.kwargs)


def test_a_cache_that_is_not_asked_for_is_ignored() -> None:
    config = zoo.hf.LlamaConfig(**{**zoo.GROUPED, "use_cache": True})
    species = replace(ZOO["Llama"], config=lambda: config)
    assert zoo.find_layers(species) == ("yes", "yes", "yes")


def gemma3n_with_shared_keys() -> Any:
    config = zoo.gemma3n()
    config.num_kv_shared_layers = 2
    return config


def test_keys_and_values_that_layers_share_are_sent() -> None:
    # The layers that share them had once to be on one stage.
    species = replace(ZOO["Gemma 3n"], config=gemma3n_with_shared_keys)
    assert zoo.describe_layers(species, 4, has_example=True) == "yes"


@pytest.mark.parametrize("name", ["GPT-2", "Llama, tied head", "Gemma 3", "BERT"])
def test_models_on_the_meta_device_get_memory_stage_by_stage(name: str) -> None:
    species = ZOO[name]
    reference = species.build()
    with torch.device("meta"):
        model = species.build().model
    pipe = split_layers(model, species.lists, 4)
    initialize = model._init_weights
    pipe.materialize([1, 2], "cpu", initialize)  # type: ignore[arg-type]  # the library's method
    for index, stage in enumerate(pipe.stages):
        assert {p.is_meta for p in stage.parameters()} == {index not in (1, 2)}
    pipe.materialize([0, 3], "cpu", initialize)  # type: ignore[arg-type]  # the library's method
    state = reference.model.state_dict()
    for stage in pipe.stages:
        stage.load_state_dict({key: state[key] for key in stage.state_dict()})
    found, expected = pipe(**reference.kwargs), reference.model(**reference.kwargs)
    torch.testing.assert_close(
        found.logits, expected.logits, rtol=species.limit, atol=species.limit
    )


def test_an_ambiguous_name_lists_the_paths_with_it() -> None:
    model: nn.Module = ZOO["T5"].build().model
    with pytest.raises(ModelError) as caught:
        split_layers(model, ["block"], 2)
    assert str(caught.value) == (
        "layers must name one module (got 'block', the end of 'encoder.block', 'decoder.block'); "
        "give a whole path"
    )
