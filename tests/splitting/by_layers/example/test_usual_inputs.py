"""What models of transformers say they take, in words, pictures and sounds."""

import transformers

from penstock.splitting.by_layers.example.usual_inputs import own_examples
from tests.splitting.small import Chain

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def shapes(name: str, **sizes: object) -> list[dict[str, tuple[int, ...]]]:
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}Model")(config)
    return [{key: tuple(t.shape) for key, t in one.items()} for one in own_examples(model)]


def test_words_come_first_then_pictures_with_them() -> None:
    vision = {**SMALL, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    text = {**SMALL, "intermediate_size": 16, "vocab_size": 9}
    words, both = shapes("CLIP", vision_config=vision, text_config=text)
    assert set(words) == {"input_ids"}
    assert set(both) == {"input_ids", "pixel_values"}
    assert both["pixel_values"][1:] == (3, 8, 8)


def test_pictures_have_the_size_of_the_configuration() -> None:
    found = shapes("ViT", **SMALL, intermediate_size=16, image_size=8, patch_size=4)
    assert {"pixel_values": (2, 3, 8, 8)} in found


def test_sounds_are_samples() -> None:
    found = shapes("Wav2Vec2", **SMALL, intermediate_size=16)
    assert {"input_values": (2, 16000)} in found


def test_a_model_that_says_nothing_has_no_example() -> None:
    assert list(own_examples(Chain())) == []
