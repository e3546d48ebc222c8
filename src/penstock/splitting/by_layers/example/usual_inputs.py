"""Inputs that a model says it takes, in the way of models of `transformers`.

    input_ids                        words: `dummy_inputs`, also for a second tower
    pixel_values                     pictures of the size in the configuration
    hidden_states, grid_thw          patches of pictures
    pixel_values, image_grid_thw     patches of pictures that come with words
    input_values, input_features     sounds

Pictures come with words that have places for them, if the model takes both. All are for runs on
the meta device, so that their sizes cost nothing.
"""

from collections.abc import Collection, Iterator, Mapping
from logging import getLogger
from typing import Any

import torch

from penstock.splitting.by_layers.example.diffusion_inputs import diffusion_examples
from penstock.splitting.by_layers.records.call_records import parameter_names
from penstock.torch_private import tree_leaves

__all__ = ["own_examples"]

_LOGGER = getLogger(__name__)
_ROWS, _WORDS, _SAMPLES, _FRAMES = 2, 5, 16000, 256
_MEL_BINS, _SIZE, _SIDE = 80, 224, 4
_WORDS_GRID = "image_grid_thw"
_Example = dict[str, Any]


def own_examples(model: Any, copy: Any) -> Iterator[_Example]:
    """Yield examples that a model may run on, the most likely first; none if it says nothing.

    Pictures and sounds have the type of the model's parameters. Its copy on the meta device is
    asked how many places pictures have among words. Inputs of the copy's own have no values.
    """
    kinds = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next(kinds, torch.float32)
    for example in _examples(model, copy, dtype):
        yield _typed(example, dtype)


def _typed(example: _Example, dtype: torch.dtype) -> _Example:
    return {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in example.items()
    }


def _examples(model: Any, copy: Any, dtype: torch.dtype) -> Iterator[_Example]:
    names, given = set(parameter_names(model)), getattr(model, "dummy_inputs", None)
    config = getattr(model, "config", None)
    words = dict(given) if isinstance(given, Mapping) else {}
    if "decoder_input_ids" in names and "input_ids" in words:
        # A model with two towers takes words for the second too.
        words = {"decoder_input_ids": words["input_ids"], **words}
    rows = len(words["input_ids"]) if "input_ids" in words else _ROWS
    pictures = [] if config is None else list(_pictures(config, names, rows))
    if words and ("input_ids" in names or not pictures):
        yield words
    for example in pictures:
        if "input_ids" in names and "input_ids" in words:
            placed = _with_places(copy, words, _typed(example, dtype), names)
            yield {**words, **example} if placed is None else placed
        yield example
    if isinstance(given, Mapping):
        yield from _sounds(config, names)
    yield from diffusion_examples(model)


def _pictures(config: Any, names: Collection[str], rows: int) -> Iterator[_Example]:
    """Yield a picture in each row, and the patches of one, as the names ask for."""
    channels = _setting(config, "num_channels") or _setting(config, "in_channels") or 3
    if "pixel_values" in names:
        size = _setting(config, "image_size") or _SIZE
        height, width = (size, size) if isinstance(size, int) else size
        yield {"pixel_values": torch.zeros(rows, channels, height, width)}
    side, frames = _setting(config, "patch_size"), _setting(config, "temporal_patch_size") or 1
    grid = next((name for name in ("grid_thw", _WORDS_GRID) if name in names), None)
    if grid is not None and isinstance(side, int):
        is_tower = grid != _WORDS_GRID and "hidden_states" in names
        patches = torch.zeros(rows * _SIDE * _SIDE, channels * frames * side * side)
        first = "hidden_states" if is_tower else "pixel_values"
        yield {first: patches, grid: torch.tensor([[1, _SIDE, _SIDE]] * rows)}


def _with_places(
    model: Any, words: _Example, pictures: _Example, names: Collection[str]
) -> _Example | None:
    """Return words with as many places for a picture as the model makes features of it."""
    token = _setting(model.config, "image_token_id")
    token = _setting(model.config, "image_token_index") if token is None else token
    if token is None or not hasattr(model, "get_image_features"):
        return None
    text = words["input_ids"]
    count = _count_places(model, pictures, len(text))
    if count is None:
        return None
    places = torch.full((len(text), count), token)
    ids = torch.cat([text[:, :2], places, text[:, 2:]], 1)
    kinds = {n: (ids == token).long() for n in names if n.endswith("token_type_ids")}
    return {**words, **pictures, "input_ids": ids, **kinds}


def _count_places(model: Any, pictures: _Example, rows: int) -> int | None:
    """Return how many features the model makes of the picture in each row."""
    if _WORDS_GRID in pictures:
        # The model's code looks at the values of the grid, so that a copy without memory cannot.
        return (_SIDE // int(_setting(model.config, "spatial_merge_size") or 1)) ** 2
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            found = model.get_image_features(**{n: t.to(device) for n, t in pictures.items()})
    except Exception as error:  # the model's own code on pictures that it may not be made for
        _LOGGER.debug("the model makes no features of %s: %s", list(pictures), error)
        return None
    features = tree_leaves(getattr(found, "pooler_output", found))
    return sum(int(one.numel() // one.shape[-1]) for one in features) // rows


def _sounds(config: Any, names: Collection[str]) -> Iterator[_Example]:
    """Yield sounds: samples, or bands and frames; with words if there is a tower for them."""
    words: _Example = {}
    if "decoder_input_ids" in names:
        words = {"decoder_input_ids": torch.ones(_ROWS, _WORDS, dtype=torch.long)}
    bands = _setting(config, "num_mel_bins") or _MEL_BINS
    positions = _setting(config, "max_source_positions")
    frames = _FRAMES if positions is None else 2 * positions
    values, features = ((_SAMPLES,), (1, _SAMPLES)), ((bands, frames), (frames, bands))
    for name, shapes in (("input_values", values), ("input_features", features)):
        for shape in shapes if name in names else ():
            yield {name: torch.zeros(_ROWS, *shape), **words}


def _setting(config: Any, name: str) -> Any:
    """Return a setting of a configuration, or of the first one inside of it that has it."""
    found = getattr(config, name, None)
    if found is not None or config is None:
        return found
    inner = (value for value in vars(config).values() if hasattr(value, "to_dict"))
    return next((v for v in (_setting(one, name) for one in inner) if v is not None), None)
