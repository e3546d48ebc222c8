"""Small configurations of every model family of the installed transformers release.

No size is written for one family alone unless the rules below do not fit it. Whatever a rule does
not name keeps its default.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["WORDS", "small_configs"]

WORDS = 96

# Names of settings and their values; the first rule that matches a whole name counts.
_RULES: tuple[tuple[str, Any], ...] = (
    (r".*(drop|jitter|mask_time_prob|mask_feature_prob|stochastic_depth).*", 0.0),
    (r"(vocab_size|.*_vocab_size|vocab_size_.*)", WORDS),
    (r"(encoder|decoder)_(num_)?(hidden_)?layers", 2),
    (r"num_(encoder|decoder)_(blocks|layers)", 2),
    (r"(num_hidden_layers|n_layers?|num_layers|depth|num_blocks|n_blocks)", 4),
    (r"(out_hidden_size|output_dim|reduction_output_channel)", 32),
    (
        r"(hidden_size|d_model|n_embd|dim|embed_dim|emb_dim|hidden_dim|d_embed|word_embed_proj_dim)",
        32,
    ),
    (r"(embedding_size|encoder_hidden_size|decoder_hidden_size|projection_dim|d_encoder)", 32),
    (r"(.*intermediate_size|.*ffn_dim|d_ff|d_inner|n_inner|ffn_hidden_size|.*ffn_embed_dim)", 64),
    (r"(moe_intermediate_size|shared_expert_intermediate_size|expert_.*size)", 16),
    (r"(num_key_value_heads|n_head_kv|num_kv_heads|attention_num_kv_heads)", 2),
    (r"(.*attention_heads|n_heads?|num_heads|.*num_attention_heads)", 4),
    (r"(rotary_dim|mamba_n_heads|n_mamba_heads|mamba_num_heads)", 4),
    (r"(mamba_d_head|mamba_head_dim|mamba_headdim)", 16),
    (r"(head_dim|d_kv|attention_head_size|global_head_dim|d_head)", 8),
    (r"qk_(rope|nope)_head_dim", 4),
    (r"v_head_dim", 8),
    (r"(q_lora_rank|kv_lora_rank)", 8),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts)", 4),
    (r"(num_experts_per_tok|num_experts_per_token|moe_k|moe_topk|top_k_experts)", 2),
    (r"(n_group|topk_group|n_shared_experts)", 1),
    (r"(image_size|image_height|image_width|img_size)", 32),
    (r"patch_size", 8),
    (r"(num_mel_bins|n_mels|num_mel_filters)", 16),
    (r"(state_size|d_state|ssm_state_size|mamba_d_state)", 4),
    (r"(max_source_positions)", 32),
    (r"(max_position_embeddings|n_positions|n_ctx|max_target_positions|seq_length)", 64),
    (r"use_cache", False),
)
# Lists of sizes of the parts of a model, which are scaled down together.
_WIDTHS = re.compile(
    r"(.*hidden_sizes|embed_dims?|dims|.*channels|conv_dim|.*_dims?|encoder_sizes)"
)
_WIDEST = 64
_LAYERS = 4
# Families with sections of rotary embeddings that only their code knows.
_SECTIONED = re.compile(r"glm4v|glm46v|glmga|glm_image|glm_ocr|qwen2_vl|qwen2_5_vl|qwen2_5_omni")
# Settings that a value of the rules does not fit.
_OWN: dict[str, dict[str, Any]] = {
    **{
        kind: {"embed_dim": 24, "window_size": 2}
        for kind in ("swin", "donut-swin", "swinv2", "maskformer-swin", "swin2sr")
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16]},
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "mamba2": {"head_dim": 16, "num_heads": 4, "n_groups": 1},
    "esm": {"pad_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "dots1": {"n_shared_experts": 1},
}


def small_configs(kind: str) -> list[Callable[[], PreTrainedConfig]]:
    """Return makers of configurations of the family with this model type, the smallest first.

    What one of them does not fit, another may: lists of widths are left unchanged, or all that
    the library sets for inner configurations is left out.
    """
    ways = (_all_settings, _plain_settings, _rules_alone)
    return [partial(_small_config, kind, settings) for settings in ways]


def _small_config(
    kind: str, settings: Callable[[PreTrainedConfig], dict[str, Any]]
) -> PreTrainedConfig:
    return _shrink(CONFIG_MAPPING[kind](), _OWN.get(kind, {}), settings)


def _shrink(
    config: PreTrainedConfig,
    own: dict[str, Any],
    settings: Callable[[PreTrainedConfig], dict[str, Any]],
) -> PreTrainedConfig:
    changes = settings(config)
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = _shrink(value, own.get(name, {}), settings)
    tokens = [n for n in vars(config) if re.fullmatch(r".*(token_id|token_index)", n)]
    last = WORDS - 1
    for name in tokens:
        value = getattr(config, name)
        if isinstance(value, int) and value >= WORDS - 16:
            changes[name], last = last, last - 1
    changes |= {
        k: v for k, v in own.items() if not isinstance(getattr(config, k, None), PreTrainedConfig)
    }
    return type(config)(**changes)


def _all_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what differs from the class, what the rules say, and lists of widths scaled down."""
    changes = _plain_settings(config)
    for name, value in vars(config).items():
        is_list = isinstance(value, list | tuple) and value and name not in changes
        if is_list and all(type(item) is int for item in value):
            if name == "depths":
                changes[name] = [min(item, 2) for item in value]
            elif _WIDTHS.fullmatch(name) and max(value) > _WIDEST:
                changes[name] = [max(8, item * _WIDEST // max(value) // 8 * 8) for item in value]
    return changes


def _plain_settings(config: PreTrainedConfig) -> dict[str, Any]:
    return {**_differing(config), **_rules_alone(config), **_lists_per_layer(config)}


def _rules_alone(config: PreTrainedConfig) -> dict[str, Any]:
    # Products of groups of experts have no float64 on a CPU.
    changes: dict[str, Any] = {"experts_implementation": "batched_mm"}
    for name, value in vars(config).items():
        changes |= _change(name, value)
    heads = getattr(config, "num_attention_heads", None)
    if "num_key_value_heads" in changes and getattr(config, "num_key_value_heads", 0) == heads:
        changes["num_key_value_heads"] = changes.get("num_attention_heads", heads)
    if hasattr(config, "qk_rope_head_dim"):
        changes.pop("head_dim", None)
    return {**changes, **_rotary(config)}


def _differing(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of an inner configuration that are not those of its class."""
    usual = type(config)()
    return {
        name: value
        for name, value in vars(config).items()
        if not name.startswith("_")
        and not isinstance(value, PreTrainedConfig)
        and name in vars(usual)
        and value != getattr(usual, name)
    }


def _lists_per_layer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return shorter lists that had an item for each layer, with all kinds of layers."""
    count = getattr(config, "num_hidden_layers", None)
    found = {}
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == count and count > _LAYERS:
            firsts = [value.index(item) for item in value if item is not None]
            others = sorted(range(len(value)), key=lambda at: (at not in firsts, at))
            found[name] = [value[at] for at in sorted(others[:_LAYERS])]
    return found


def _has_sections(config: PreTrainedConfig, rotary: dict[str, Any]) -> bool:
    return "mrope_section" in rotary or bool(_SECTIONED.match(config.model_type))


def _rotary(config: PreTrainedConfig) -> dict[str, Any]:
    """Return sections of rotary embeddings that fit heads of 8."""
    found = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(config, name, None)
        if isinstance(value, dict) and _has_sections(config, value):
            part = value.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1))
            found[name] = {**value, "mrope_section": [1, 1, 0] if (part or 1) < 1 else [2, 1, 1]}
    return found


def _change(name: str, value: Any) -> dict[str, Any]:
    for rule, small in _RULES:
        if re.fullmatch(rule, name):
            is_number = isinstance(value, int | float) and not isinstance(small, bool)
            if isinstance(value, bool):
                return {name: small} if isinstance(small, bool) else {}
            if value is None and name in ("head_dim", "vocab_size"):
                return {name: small}
            is_count = "layers" in name or name in ("n_layer", "depth")
            return {name: type(value)(small)} if is_number and (is_count or value > small) else {}
    return {}
