"""Inputs that few families require: boxes of words, masks of sounds, times of a series."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["add_required"]

# Some families require these in their code, not in the signature.
_REQUIRED_IN_CODE = frozenset({"bbox", "visual_feats", "visual_pos", "input_features_mask"})


def add_required(
    model: Any,
    names: Mapping[str, inspect.Parameter],
    inputs: dict[str, Any],
    rows: int,
    words: int,
) -> dict[str, Any]:
    """Return inputs with all that the forward requires beyond them, where we know what it is."""
    found = dict(inputs)
    for name, parameter in names.items():
        is_required = parameter.default is inspect.Parameter.empty or name in _REQUIRED_IN_CODE
        if name not in found and is_required:
            made = _make(name, model.config, found, rows, words)
            if made is not None:
                found[name] = made
    return found


def _make(name: str, config: Any, found: dict[str, Any], rows: int, words: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    first = next(iter(found.values()))
    length = found["input_ids"].shape[1] if "input_ids" in found else words
    match name:
        case "bbox":
            corner = torch.randint(0, 20, (rows, length, 2), generator=generator)
            return torch.cat([corner, corner + 8], 2)
        case "visual_feats":
            return torch.randn(rows, 3, config.visual_feat_dim, generator=generator)
        case "visual_pos":
            return torch.rand(rows, 3, config.visual_pos_dim, generator=generator)
        case "input_features_mask":
            return torch.ones(rows, first.shape[-1], dtype=torch.long)
        case "qformer_input_ids":
            return torch.randint(3, 60, (rows, 4), generator=generator)
        case "past_time_features":
            return torch.zeros(rows, first.shape[1], config.num_time_features)
        case "past_observed_mask":
            return torch.ones_like(first)
        case "past_values_padding":
            return torch.zeros(rows, first.shape[1])
        case "freq":
            return torch.zeros(rows, 1, dtype=torch.long)
        case "merge_sizes":
            return torch.ones(rows, dtype=torch.long)
        case "encoder_hidden_states" | "query_embeds" | "noise_embeds" | "context_hidden_states":
            return torch.randn(rows, words, 32, generator=generator)
        case "input":
            return torch.randn(rows, 3, 32, 32, generator=generator)
        case _:
            return None
