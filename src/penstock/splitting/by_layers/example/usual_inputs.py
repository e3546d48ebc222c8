"""Inputs that a model says it takes, in the way of models of `transformers`.

    input_ids                        words: `dummy_inputs`, also for a second tower
    pixel_values                     pictures of the size in the configuration
    input_values, input_features     sounds

They are for runs on the meta device, so that their sizes cost nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from penstock.splitting.by_layers.records.call_records import parameter_names

__all__ = ["own_examples"]

_ROWS, _WORDS, _SAMPLES, _FRAMES = 2, 5, 16000, 256
_MEL_BINS, _SIZE = 80, 224


def own_examples(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield examples that a model may run on, the most likely first; none if it says nothing.

    Pictures and sounds have the type of the model's parameters.
    """
    kinds = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next(kinds, torch.float32)
    for example in _examples(model):
        yield {n: t.to(dtype) if t.is_floating_point() else t for n, t in example.items()}


def _examples(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    names, given = set(parameter_names(model)), getattr(model, "dummy_inputs", None)
    config = getattr(model, "config", None)
    words = dict(given) if isinstance(given, Mapping) else {}
    if "decoder_input_ids" in names and "input_ids" in words:
        # A model with two towers takes words for the second too.
        words = {"decoder_input_ids": words["input_ids"], **words}
    has_pictures = "pixel_values" in names and config is not None
    pictures = _pictures(config) if has_pictures else {}
    if words and ("input_ids" in names or not pictures):
        yield words
    if pictures:
        is_both = "input_ids" in names and bool(words)
        yield {**words, **pictures} if is_both else pictures
    if "decoder_input_ids" in names:
        words = {"decoder_input_ids": torch.ones(_ROWS, _WORDS, dtype=torch.long)}
    else:
        words = {}
    if not isinstance(given, Mapping):
        return
    for name, shape in _sounds(config):
        if name in names:
            yield {name: torch.zeros(_ROWS, *shape), **words}


def _pictures(config: Any) -> dict[str, torch.Tensor]:
    size, channels = _setting(config, "image_size"), _setting(config, "num_channels")
    size = _SIZE if size is None else size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.zeros(_ROWS, channels or 3, height, width)}


def _sounds(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield inputs of sounds and the shapes of a row: samples, or bands and frames."""
    bands = _setting(config, "num_mel_bins") or _MEL_BINS
    positions = _setting(config, "max_source_positions")
    frames = _FRAMES if positions is None else 2 * positions
    yield "input_values", (_SAMPLES,)
    yield "input_values", (1, _SAMPLES)
    yield "input_features", (bands, frames)
    yield "input_features", (frames, bands)


def _setting(config: Any, name: str) -> Any:
    """Return a setting of a configuration, or of the first one inside of it that has it."""
    found = getattr(config, name, None)
    if found is not None or config is None:
        return found
    inner = (value for value in vars(config).values() if hasattr(value, "to_dict"))
    return next((v for v in (_setting(one, name) for one in inner) if v is not None), None)
