"""Blocks of published models: both halves equal plain autograd, and which weights are deferred."""

import copy
import os
from collections.abc import Callable
from typing import Any

# Set before the library is imported, which reads it.
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.deferred.halves import (
    MICROBATCHES,
    Apply,
    assert_same,
    check,
    run_plain,
    run_split,
    waiting_weights,
)

# Configurations take more arguments than their types declare.
hf: Any = transformers
WORDS = 32
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "use_cache": False,
}


def _logits(model: nn.Module) -> nn.Module:
    return Apply(lambda m, x: m.model(input_ids=x).logits, model=model)


def _gpt2() -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "use_cache": False}
    return _logits(hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)))


def _qwen3_moe(implementation: str) -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = hf.Qwen3MoeConfig(
        **SIZES, **experts, head_dim=8, experts_implementation=implementation,
        tie_word_embeddings=True,
    )  # fmt: skip
    return _logits(hf.Qwen3MoeForCausalLM(config))


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(**SIZES, num_local_experts=3, experts_implementation="eager")
    return _logits(hf.MixtralForCausalLM(config))


def _llama_with_lora() -> nn.Module:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    adapters = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens", "down_proj"])
    return _logits(get_peft_model(model, adapters))


def _gpt2_with_lora() -> nn.Module:
    model = _gpt2().get_submodule("model")
    adapters = LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return _logits(get_peft_model(model, adapters))


ATTENTION = {f"self_attn.{name}_proj.weight" for name in "qkvo"}

# Names of parameters inside the block.
MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "gpt2": (
        _gpt2,
        {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}
        | {"wte.weight", "wpe.weight"},
    ),
    "gpt2_with_lora": (
        _gpt2_with_lora,
        {
            f"{layer}.lora_{matrix}.default.weight"
            for layer in ("attn.c_attn", "mlp.c_fc")
            for matrix in "AB"
        },
    ),
    "qwen3_moe": (
        lambda: _qwen3_moe("eager"),
        ATTENTION
        | {"embed_tokens.weight", "mlp.gate.weight"}
        | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    ),
    "mixtral": (
        _mixtral,
        ATTENTION
        | {"embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"}
        | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    ),
    "llama_with_lora": (
        _llama_with_lora,
        {
            f"{layer}.lora_{matrix}.default.weight"
            for layer in ("self_attn.q_proj", "mlp.down_proj")
            for matrix in "AB"
        }
        | {f"embed_tokens.lora_embedding_{matrix}.default" for matrix in "AB"},
    ),
}


def _short(name: str) -> str:
    """Return a parameter's name inside the block."""
    path = name.replace("base_model.model.", "").replace("_orig_mod.", "")
    for start in ("model.transformer.h.0.", "model.transformer.", "model.model.layers.0."):
        path = path.removeprefix(start)
    return path.removeprefix("model.model.").removeprefix("model.")


def _words() -> torch.Tensor:
    return torch.randint(3, WORDS, (2, 7))


@pytest.mark.parametrize("name", MODELS)
def test_two_halves_of_a_model_equal_the_whole(name: str) -> None:
    torch.manual_seed(1)
    check(MODELS[name][0], [_words() for _ in range(MICROBATCHES)])


@pytest.mark.parametrize("name", MODELS)
def test_the_products_of_a_model_are_deferred(name: str) -> None:
    torch.manual_seed(1)
    build, waiting = MODELS[name]
    assert {_short(found) for found in waiting_weights(build().double(), _words())} == waiting


def test_experts_in_grouped_products_are_deferred_and_exact() -> None:
    # Torch has no grouped products in float64.
    torch.manual_seed(1)
    module = _qwen3_moe("grouped_mm")
    reference = copy.deepcopy(module)
    values = [_words() for _ in range(MICROBATCHES)]
    expected = run_plain(reference, values)
    assert_same(run_split(module, values), expected, rtol=1e-4, atol=1e-5)
    waiting = {_short(name) for name in waiting_weights(module, values[0])}
    assert waiting == MODELS["qwen3_moe"][1]
