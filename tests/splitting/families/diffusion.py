"""Small transformers and UNets of diffusers, which is optional in the tests."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["DIFFUSION"]

_IMAGES, _WORDS, _ROWS = 8, 6, 4
_DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 4}
_UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "in_channels": 4,
    "out_channels": 4,
    "norm_num_groups": 4,
    "sample_size": _IMAGES,
}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(_ROWS, *shape, generator=torch.Generator().manual_seed(1))


def _times() -> torch.Tensor:
    return torch.tensor([1, 5, 250, 900])


def _picture(channels: int = 4) -> dict[str, torch.Tensor]:
    return {"hidden_states": _noise(channels, _IMAGES, _IMAGES), "timestep": _times()}


def _with_text(width: int) -> dict[str, torch.Tensor]:
    return {**_picture(), "encoder_hidden_states": _noise(_WORDS, width)}


def _mask() -> torch.Tensor:
    mask = torch.ones(_ROWS, _WORDS, dtype=torch.bool)
    mask[0, -2:] = False
    return mask


def _places(count: int) -> torch.Tensor:
    return torch.arange(count * 3).reshape(count, 3) % 4


# The class, its sizes, its inputs, and the names of those that all rows share.
DIFFUSION: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "DiTTransformer2DModel": (
        {**_DIT, "in_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 10},
        lambda: {**_picture(), "class_labels": torch.tensor([1, 2, 3, 4])},
        (),
    ),
    "PixArtTransformer2DModel": (
        {
            **_DIT,
            "in_channels": 4,
            "sample_size": 8,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "use_additional_conditions": False,
        },
        lambda: {
            **_with_text(8),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        ("added_cond_kwargs",),
    ),
    "SD3Transformer2DModel": (
        {
            **_DIT,
            "in_channels": 4,
            "sample_size": 8,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 32,
            "out_channels": 4,
            "pos_embed_max_size": 16,
        },
        lambda: {**_with_text(16), "pooled_projections": _noise(32)},
        (),
    ),
    "FluxTransformer2DModel": (
        {
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": _noise(16, 4),
            "encoder_hidden_states": _noise(_WORDS, 32),
            "pooled_projections": _noise(32),
            "timestep": _times() / 1000,
            "img_ids": _places(16),
            "txt_ids": _places(_WORDS),
        },
        ("img_ids", "txt_ids"),
    ),
    "SanaTransformer2DModel": (
        {
            **_DIT,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "sample_size": 8,
        },
        lambda: _with_text(8),
        (),
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 256,
        },
        lambda: _with_text(32),
        (),
    ),
    "CogVideoXTransformer3DModel": (
        {
            **_DIT,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": 8,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 8,
            "max_text_seq_length": _WORDS,
        },
        lambda: {
            "hidden_states": _noise(2, 4, 8, 8),
            "encoder_hidden_states": _noise(_WORDS, 8),
            "timestep": _times(),
        },
        (),
    ),
    "LTXVideoTransformer3DModel": (
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "cross_attention_dim": 32,
            "num_layers": 4,
            "caption_channels": 16,
        },
        lambda: {
            "hidden_states": _noise(32, 8),
            "encoder_hidden_states": _noise(_WORDS, 16),
            "timestep": _times(),
            "encoder_attention_mask": _mask(),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
        ("num_frames", "height", "width"),
    ),
    "Lumina2Transformer2DModel": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 4,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (64, 64, 64),
            "cap_feat_dim": 8,
        },
        lambda: {**_with_text(8), "encoder_attention_mask": _mask()},
        (),
    ),
    "WanTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "ffn_dim": 32,
            "num_layers": 4,
            "rope_max_seq_len": 32,
        },
        lambda: {
            "hidden_states": _noise(4, 2, 8, 8),
            "encoder_hidden_states": _noise(_WORDS, 16),
            "timestep": _times(),
        },
        (),
    ),
    "MochiTransformer3DModel": (
        {
            **_DIT,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "time_embed_dim": 4,
            "text_embed_dim": 16,
            "max_sequence_length": 16,
        },
        lambda: {
            "hidden_states": _noise(4, 2, 8, 8),
            "encoder_hidden_states": _noise(_WORDS, 16),
            "timestep": _times(),
            "encoder_attention_mask": _mask(),
        },
        (),
    ),
    "UNet2DConditionModel": (
        {
            **_UNET,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 8,
            "attention_head_dim": 2,
        },
        lambda: {
            "sample": _noise(4, 8, 8),
            "timestep": _times(),
            "encoder_hidden_states": _noise(_WORDS, 8),
        },
        (),
    ),
    "UNet2DModel": (
        {
            **_UNET,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 2,
        },
        lambda: {"sample": _noise(4, 8, 8), "timestep": _times()},
        (),
    ),
}
