"""What models of transformers say they take, in words, pictures and sounds."""

from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import nn

from penstock.splitting.by_layers.example.own_example import find_own_dependencies
from penstock.splitting.by_layers.example.usual_inputs import own_examples
from tests.splitting.small import Chain
from tests.splitting.zoo import IMAGE, ZOO

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def examples_of(model: nn.Module) -> list[dict[str, Any]]:
    return list(own_examples(model, deepcopy(model).to("meta")))


def shapes(name: str, **sizes: object) -> list[dict[str, tuple[int, ...]]]:
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}Model")(config)
    return [{key: tuple(t.shape) for key, t in one.items()} for one in examples_of(model)]


def test_words_come_first_then_pictures_with_them() -> None:
    vision = {**SMALL, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    text = {**SMALL, "intermediate_size": 16, "vocab_size": 9}
    words, both, pictures = shapes("CLIP", vision_config=vision, text_config=text)
    assert set(words) == {"input_ids"}
    # The pictures once had rows of their own, and no model ran on both.
    assert both == {**words, "pixel_values": (words["input_ids"][0], 3, 8, 8)}
    assert set(pictures) == {"pixel_values"}


def test_words_have_places_for_the_features_of_pictures() -> None:
    # Words without places were refused by the model, so that its example had words alone.
    model = ZOO["LLaVA"].build().model
    words, both, _ = examples_of(model)
    assert (words["input_ids"] == IMAGE).sum() == 0
    assert tuple(both["pixel_values"].shape) == (3, 3, 16, 16)
    assert (both["input_ids"] == IMAGE).sum(1).tolist() == [4, 4, 4]


def test_patches_come_with_their_grid() -> None:
    sizes: Any = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    config = transformers.Glm4vVisionConfig(**sizes, patch_size=2, image_size=8)
    patches, *_ = examples_of(transformers.Glm4vVisionModel(config))
    assert tuple(patches["hidden_states"].shape) == (3 * 16, 3 * 2 * 2 * 2)
    assert patches["grid_thw"].tolist() == [[1, 4, 4]] * 3


def test_patches_among_words_have_as_many_places_as_are_left_of_them() -> None:
    # Words ran without pictures, so that a tower behind the layers was on the last stage.
    text: Any = {**SMALL, "num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 40}
    rope: Any = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision: Any = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, image_token_id=39
    )
    made: Any = transformers.Qwen2VLForConditionalGeneration
    model = made(config)
    both = next(one for one in examples_of(model) if {"input_ids", "image_grid_thw"} <= one.keys())
    assert tuple(both["pixel_values"].shape) == (3 * 16, 3 * 2 * 4 * 4)
    assert (both["input_ids"] == 39).sum(1).tolist() == [4, 4, 4]
    calls = [
        {call.path.rpartition("model.")[2] for call in found.calls}
        for found in find_own_dependencies(model, ["model.language_model.layers"])
    ]
    assert ["visual" in called for called in calls] == [False, True]


def test_pictures_have_the_size_of_the_configuration() -> None:
    found = shapes("ViT", **SMALL, intermediate_size=16, image_size=8, patch_size=4)
    assert [one["pixel_values"][1:] for one in found] == [(3, 8, 8)]


def test_sounds_are_samples() -> None:
    found = shapes("Wav2Vec2", **SMALL, intermediate_size=16)
    assert {"input_values": (2, 16000)} in found


def test_sounds_have_the_type_of_the_parameters() -> None:
    # They were float32, in which a model in bfloat16 or float64 does not run.
    sizes: Any = {**SMALL, "intermediate_size": 16}
    config = transformers.Wav2Vec2Config(**sizes)
    examples = examples_of(transformers.Wav2Vec2Model(config).double())
    assert {t.dtype for one in examples for t in one.values() if t.is_floating_point()} == {
        torch.float64
    }


def test_a_model_that_says_nothing_has_no_example() -> None:
    assert examples_of(Chain()) == []


def test_inputs_of_a_models_own_have_values() -> None:
    # Those of BART are made on the device of the model, and were asked of a copy without memory,
    # where its code could not look at the mask.
    model = ZOO["BART"].build().model
    assert {t.device.type for one in examples_of(model) for t in one.values()} == {"cpu"}
    assert list(find_own_dependencies(model, ["encoder.layers", "decoder.layers"]))
