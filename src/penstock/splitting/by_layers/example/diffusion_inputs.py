"""Inputs that a diffusion model says it takes, by its configuration, in the way of `diffusers`.

    hidden_states, sample     noise: a picture, frames of one, or their tokens
    timestep                  one per row
    encoder_hidden_states     words that another model has embedded

They are for runs on the meta device, so that their sizes cost nothing.
"""

from collections.abc import Iterator, Mapping
from inspect import Parameter, signature
from typing import Any

import torch

__all__ = ["diffusion_examples"]

_ROWS, _WORDS, _SIDE, _FRAMES, _AXES = 2, 6, 8, 2, 3
_OPTIONAL = Parameter("optional", Parameter.KEYWORD_ONLY, default=None)
# What says how wide embedded words are; the first that a configuration has counts.
_TEXT_WIDTHS = (
    "caption_channels",
    "text_embed_dim",
    "text_dim",
    "cap_feat_dim",
    "joint_attention_dim",
    "cross_attention_dim",
)


def diffusion_examples(model: Any) -> Iterator[dict[str, Any]]:
    """Yield examples of noise in every form that a model may take; none if it takes no steps."""
    names, config = signature(model.forward).parameters, getattr(model, "config", None)
    channels = getattr(config, "in_channels", None)
    first = next((name for name in ("hidden_states", "sample") if name in names), None)
    if first is None or "timestep" not in names or not isinstance(channels, int):
        return
    side = _setting(config, "sample_size", "sample_width") or _SIDE
    others = dict(_beside(names, config, side))
    for shape in (
        (channels, side, side),
        (channels, _FRAMES, side, side),
        (_FRAMES, channels, side, side),
        (side * side, channels),
    ):
        yield {first: torch.zeros(_ROWS, *shape), **others}


def _beside(names: Mapping[str, Parameter], config: Any, side: int) -> Iterator[tuple[str, Any]]:
    """Yield what a model takes beside the noise."""
    text, pooled = _setting(config, *_TEXT_WIDTHS), _setting(config, "pooled_projection_dim")
    known: dict[str, Any] = {
        "timestep": torch.ones(_ROWS, dtype=torch.long),
        "class_labels": torch.zeros(_ROWS, dtype=torch.long),
        "encoder_hidden_states": torch.zeros(_ROWS, _WORDS, text or 1),
        "encoder_attention_mask": torch.ones(_ROWS, _WORDS, dtype=torch.bool),
        "pooled_projections": torch.zeros(_ROWS, pooled or 1),
        "img_ids": torch.zeros(side * side, _AXES),
        "txt_ids": torch.zeros(_WORDS, _AXES),
        "num_frames": 1,
        "height": side,
        "width": side,
    }
    has_mask = names.get("encoder_attention_mask", _OPTIONAL).default is Parameter.empty
    has_classes = _setting(config, "num_embeds_ada_norm", "num_class_embeds") is not None
    left_out = {"encoder_attention_mask": not has_mask, "class_labels": not has_classes}
    for name, value in known.items():
        if name in names and not left_out.get(name, False):
            yield name, value


def _setting(config: Any, *names: str) -> int | None:
    """Return the first of these settings that a configuration has."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)
