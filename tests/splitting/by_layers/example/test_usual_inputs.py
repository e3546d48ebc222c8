"""What models of transformers say they take, in words, pictures and sounds."""

from typing import Any

import torch
import transformers

from penstock.splitting.by_layers.example.usual_inputs import own_examples
from tests.splitting.small import Chain
from tests.splitting.zoo import IMAGE, ZOO

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def shapes(name: str, **sizes: object) -> list[dict[str, tuple[int, ...]]]:
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}Model")(config)
    return [{key: tuple(t.shape) for key, t in one.items()} for one in own_examples(model)]


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
    model = ZOO["LLaVA"].build().model.to("meta")
    words, both, _ = own_examples(model)
    assert (words["input_ids"] == IMAGE).sum() == 0
    assert tuple(both["pixel_values"].shape) == (3, 3, 16, 16)
    assert (both["input_ids"] == IMAGE).sum(1).tolist() == [4, 4, 4]


def test_patches_come_with_their_grid() -> None:
    sizes: Any = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    config = transformers.Glm4vVisionConfig(**sizes, patch_size=2, image_size=8)
    patches, *_ = own_examples(transformers.Glm4vVisionModel(config))
    assert tuple(patches["hidden_states"].shape) == (3 * 16, 3 * 2 * 2 * 2)
    assert patches["grid_thw"].tolist() == [[1, 4, 4]] * 3


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
    examples = list(own_examples(transformers.Wav2Vec2Model(config).double()))
    assert {t.dtype for one in examples for t in one.values() if t.is_floating_point()} == {
        torch.float64
    }


def test_a_model_that_says_nothing_has_no_example() -> None:
    assert list(own_examples(Chain())) == []
