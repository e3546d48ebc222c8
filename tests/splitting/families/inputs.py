"""Inputs for models of any family, by the names that their forwards take.

input_ids         4 rows of words, with padding
pixel_values      4 pictures, or the patches of 4 pictures with image_grid_thw
input_features    4 sounds
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tests.splitting.families.configs import WORDS
from tests.splitting.families.rarer_inputs import add_required

__all__ = ["ROWS", "make_inputs", "rows_of"]

ROWS, LENGTH = 4, 8
# Patches along each side of a picture that is given as patches.
_SIDE = 4
# What one row of sounds, videos and series may be; the first that a family takes counts.
_SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "input_features": ((16, 64), (64, 16), (8, 80), (16, 128), (80, 64)),
    "input_values": ((640,), (4000,), (1, 640), (64, 16), (1024, 16)),
    "audio_values": ((1, 640),),
    "pixel_values_videos": ((4, 3, 32, 32), (16, 3, 32, 32)),
    "past_values": ((32,), (32, 1), (64,)),
}


def rows_of(inputs: Mapping[str, Any], row: int, shared: Collection[str] = ()) -> dict[str, Any]:
    """Return one row of inputs; a row of patches has all patches of one picture."""
    found = {}
    for name, value in inputs.items():
        if name in shared:
            found[name] = value
        else:
            length = len(value) // ROWS
            found[name] = value[row * length : (row + 1) * length]
    return found


def make_inputs(model: nn.Module, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield what the model may be called with, the most complete first."""
    names = inspect.signature(model.forward).parameters
    for inputs in _candidates(model, names, dtype):
        if inputs:
            yield {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in add_required(model, names, inputs, ROWS, LENGTH).items()
            }


def _candidates(model: Any, names: Any, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
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
    if {"pixel_values", "input_ids"} <= names.keys():
        yield from _with_pictures(model, texts, names, dtype)
    if "grid_thw" in names:
        first = "hidden_states" if "hidden_states" in names else "pixel_values"
        patches, grid = _patches(config)
        yield {first: patches, "grid_thw": grid}
    if "pixel_values" in names:
        for shape in (4, 5):
            for size in (None, 64):
                for extra in ({}, texts):
                    yield {**_pictures(config, generator, shape, size), **extra}
    for name, sizes in _SIZES.items():
        if name in names and not texts.keys() - {"decoder_input_ids"}:
            extra = {"decoder_input_ids": words[:, :5]} if "decoder_input_ids" in names else {}
            for row in sizes:
                yield {name: torch.randn(ROWS, *row, generator=generator), **extra}
    yield texts
    if "inputs_embeds" in names:
        yield {"inputs_embeds": torch.randn(ROWS, LENGTH, 32, generator=generator)}


def _pictures(
    config: Any, generator: torch.Generator, dimensions: int, size: int | None = None
) -> dict[str, Any]:
    if size is None:
        found = _find(config, "image_size", 32)
        size = found if isinstance(found, int) else found[0]
    channels = _find(config, "num_channels", 3)
    frames = (_find(config, "num_frames", 2),) if dimensions == 5 else ()
    shape = (ROWS, *frames, channels, size, size)
    return {"pixel_values": torch.randn(shape, generator=generator)}


def _patches(config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the patches of pictures, and how many there are along time, height and width."""
    channels = _find(config, "in_channels", _find(config, "num_channels", 3))
    frames, side = _find(config, "temporal_patch_size", 1), _find(config, "patch_size", 8)
    width = channels * frames * side * side
    generator = torch.Generator().manual_seed(2)
    patches = torch.randn(ROWS * _SIDE * _SIDE, width, generator=generator)
    return patches, torch.tensor([[1, _SIDE, _SIDE]] * ROWS)


def _with_pictures(
    model: Any, texts: dict[str, Any], names: Any, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Yield text with as many places for a picture as the model makes features of it."""
    config = model.config
    token = _find(config, "image_token_id", _find(config, "image_token_index", None))
    if token is None or not hasattr(model, "get_image_features"):
        return
    if "image_grid_thw" in names:
        patches, grid = _patches(getattr(config, "vision_config", config))
        given = {"pixel_values": patches.to(dtype), "image_grid_thw": grid}
    else:
        given = _pictures(config, torch.Generator().manual_seed(2), 4)
        given["pixel_values"] = given["pixel_values"].to(dtype)
    try:
        with torch.no_grad():
            features = model.get_image_features(**given)
    except Exception:  # whatever a family raises for pictures of this form
        return
    found = getattr(features, "pooler_output", features)
    first = found[0] if isinstance(found, list | tuple) else found
    count = first.numel() // first.shape[-1] // (1 if isinstance(found, list | tuple) else ROWS)
    ids = torch.full((ROWS, count), token)
    words = torch.cat([texts["input_ids"][:, :2], ids, texts["input_ids"][:, 2:]], 1)
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words), **given}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in names:
            inputs[name] = (words == token).long()
    yield inputs


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
