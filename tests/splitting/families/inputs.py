"""Inputs for models of any family, by the names that their forwards take."""

import inspect
from typing import Any

import torch
from torch import nn

from tests.splitting.families.configs import WORDS

__all__ = ["make_inputs"]

ROWS, LENGTH = 4, 8


def make_inputs(model: nn.Module) -> list[dict[str, Any]]:
    """Return what the model may be called with, the most complete first."""
    names = inspect.signature(model.forward).parameters
    config: Any = model.config
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, WORDS - 24, (ROWS, LENGTH), generator=generator)
    texts: dict[str, Any] = {}
    if "input_ids" in names:
        texts["input_ids"] = words
        if "attention_mask" in names:
            mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
            mask[0, :2] = 0
            texts["attention_mask"] = mask
    if "decoder_input_ids" in names:
        texts["decoder_input_ids"] = words[:, :5]
    found = [_with_pictures(model, texts)] if {"pixel_values", "input_ids"} <= names.keys() else []
    if "pixel_values" in names:
        found += [
            {**_pictures(config, generator, shape), **extra}
            for shape in (4, 5)
            for extra in ({}, texts)
        ]
    for name, shapes in (
        ("input_features", ((16, 64), (64, 16), (8, 80))),
        ("input_values", ((640,), (1, 640), (64, 16))),
        ("audio_values", ((1, 640),)),
        ("pixel_values_videos", ((4, 3, 32, 32),)),
        ("past_values", ((32,), (32, 1))),
    ):
        if name in names and not texts.keys() - {"decoder_input_ids"}:
            extra = {"decoder_input_ids": words[:, :5]} if "decoder_input_ids" in names else {}
            found += [
                {name: torch.randn(ROWS, *shape, generator=generator).double(), **extra}
                for shape in shapes
            ]
    embedded = {"inputs_embeds": torch.randn(ROWS, LENGTH, 32, generator=generator).double()}
    found += [texts, *([embedded] if "inputs_embeds" in names else [])]
    return [inputs for inputs in found if inputs]


def _pictures(config: Any, generator: torch.Generator, dimensions: int) -> dict[str, Any]:
    size = _find(config, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    channels = _find(config, "num_channels", 3)
    frames = (_find(config, "num_frames", 2),) if dimensions == 5 else ()
    shape = (ROWS, *frames, channels, size, size)
    return {"pixel_values": torch.randn(shape, generator=generator).double()}


def _with_pictures(model: Any, texts: dict[str, Any]) -> dict[str, Any]:
    """Return text with as many places for a picture as the model makes features of it."""
    config = model.config
    token = _find(config, "image_token_id", _find(config, "image_token_index", None))
    if token is None or not hasattr(model, "get_image_features"):
        return {}
    pictures = _pictures(config, torch.Generator().manual_seed(2), 4)
    try:
        with torch.no_grad():
            features = model.get_image_features(**pictures)
    except Exception:  # whatever a family raises for pictures of this form
        return {}
    found = getattr(features, "pooler_output", features)
    first = found[0] if isinstance(found, list | tuple) else found
    count = first.numel() // first.shape[-1] // (1 if isinstance(found, list | tuple) else ROWS)
    ids = torch.full((ROWS, count), token)
    words = torch.cat([ids, texts["input_ids"]], 1)
    return {"input_ids": words, "attention_mask": torch.ones_like(words), **pictures}


def _find(config: Any, name: str, default: Any) -> Any:
    """Return a setting of a configuration, or of one inside of it."""
    if getattr(config, name, None) is not None:
        return getattr(config, name)
    for inner in vars(config).values():
        if hasattr(inner, "to_dict"):
            value = _find(inner, name, None)
            if value is not None:
                return value
    return default
