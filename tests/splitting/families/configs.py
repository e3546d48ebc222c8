"""Small configurations of every model family of the installed transformers release.

No size is written for one family alone unless the rules below do not fit it. Whatever a rule does
not name keeps its default.
"""

import re
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["WORDS", "small_config"]

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
# Settings that a value of the rules does not fit.
_OWN: dict[str, dict[str, Any]] = {
    **{kind: {"embed_dim": 24} for kind in ("donut-swin", "swinv2", "maskformer-swin", "swin2sr")},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
    },
    "reformer": {"is_decoder": True},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "mamba2": {"head_dim": 16, "num_heads": 4, "n_groups": 1},
    "esm": {"pad_token_id": 0},
    "dots1": {"n_shared_experts": 1},
}


def small_config(kind: str) -> PreTrainedConfig:
    """Return a small configuration of the family with this model type."""
    return _shrink(CONFIG_MAPPING[kind](), _OWN.get(kind, {}))


def _shrink(config: PreTrainedConfig, own: dict[str, Any]) -> PreTrainedConfig:
    # Products of groups of experts have no float64 on a CPU.
    changes: dict[str, Any] = {"experts_implementation": "batched_mm"}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = _shrink(value, own.get(name, {}))
        elif name not in own:
            changes |= _change(name, value)
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


def _change(name: str, value: Any) -> dict[str, Any]:
    for rule, small in _RULES:
        if re.fullmatch(rule, name):
            is_number = isinstance(value, int | float) and not isinstance(small, bool)
            if isinstance(value, bool):
                return {name: small} if isinstance(small, bool) else {}
            if value is None and name == "head_dim":
                return {name: small}
            is_count = "layers" in name or name in ("n_layer", "depth")
            return {name: type(value)(small)} if is_number and (is_count or value > small) else {}
    return {}
