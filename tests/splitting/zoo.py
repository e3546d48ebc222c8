"""Architectures of the current transformers release, built small from their configurations.

    python -m tests.splitting.zoo > docs/models.md

writes the table that says how each of them can be split; the tests hold it to what they find.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Said once and for all, before the library is loaded and looks.
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from torch import nn

from penstock.errors import PenstockError
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.by_tracing.traced import split_traced
from penstock.splitting.pipe import Pipe
from tests.splitting.checking import assert_same_gradients, assert_same_names, first_tensor

__all__ = ["ZOO", "Example", "Species", "describe_layers", "describe_traced", "write_table"]

# Configurations take more than their types say.
hf: Any = transformers
ROWS, LENGTH = 4, 6
WORDS = 64
IMAGE = WORDS - 1  # the word that represents a part of an image


@dataclass(frozen=True)
class Example:
    """A model in float64, its lists of layers, and what it may be called with."""

    model: nn.Module
    lists: tuple[str, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Species:
    """One architecture: how to build it, and how near to the unsplit model its gradients are.

    Some models compute parts in float32 whatever they are given; sums over microbatches then
    differ by as much.
    """

    name: str
    kind: type[nn.Module]
    config: Callable[[], Any]
    lists: tuple[str, ...] = ("model.layers",)
    inputs: Callable[[], dict[str, Any]] = field(default=lambda: {**words(), **padding()})
    limit: float = 1e-12

    def build(self) -> Example:
        """Build the same model and inputs every time."""
        torch.manual_seed(0)
        model = self.kind(self.config()).double()
        given = {
            name: value.double()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self.inputs().items()
        }
        return Example(model, self.lists, given)


def words(name: str = "input_ids", length: int = LENGTH) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(name))
    return {name: torch.randint(3, WORDS - 2, (ROWS, length), generator=generator)}


def padding(length: int = LENGTH) -> dict[str, Any]:
    mask = torch.ones(ROWS, length, dtype=torch.long)
    mask[0, :2] = 0
    return {"attention_mask": mask}


def signal(name: str, *shape: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(ROWS, *shape, generator=generator)}


def picture_and_words() -> dict[str, Any]:
    text = words(length=10)["input_ids"]
    text[:, 1:5] = IMAGE
    return {"input_ids": text, **signal("pixel_values", 3, 16, 16)}


SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "use_cache": False}
EXPERTS: dict[str, Any] = {**GROUPED, "experts_implementation": "batched_mm"}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
TWO_TOWERS: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
MIXED_ATTENTION = ["sliding_attention", "full_attention"] * 2


def gpt2() -> Any:
    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "use_cache": False}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return hf.GPT2Config(**sizes, **dropout, bos_token_id=1, eos_token_id=2)


def qwen2() -> Any:
    window = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 4}
    return hf.Qwen2Config(**GROUPED, **window)


def qwen3_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return hf.Qwen3MoeConfig(**EXPERTS, **experts, head_dim=8)


def deepseek() -> Any:
    heads = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    rest = {"moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
    sizes = {**EXPERTS, "num_key_value_heads": 4, "v_head_dim": 8}
    return hf.DeepseekV3Config(**sizes, **heads, **experts, **rest)


def gemma3n() -> Any:
    per_layer = {"vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 8}
    rest = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}
    return hf.Gemma3nTextConfig(
        **{**GROUPED, "intermediate_size": [64] * 4},
        **per_layer,
        **rest,
        head_dim=8,
        num_kv_shared_layers=0,
        layer_types=MIXED_ATTENTION,
        sliding_window=4,
        pad_token_id=0,
    )


def t5() -> Any:
    sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    return hf.T5Config(**sizes, num_layers=2, dropout_rate=0, use_cache=False)


def whisper() -> Any:
    lengths = {"max_source_positions": 10, "max_target_positions": 12}
    return hf.WhisperConfig(**TWO_TOWERS, **lengths, num_mel_bins=8)


def wav2vec2() -> Any:
    dropout = ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout")
    silent = dict.fromkeys((*dropout, "activation_dropout", "layerdrop", "mask_time_prob"), 0)
    ears = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    return hf.Wav2Vec2Config(**SIZES, **silent, **ears, **places, num_feat_extract_layers=2)


def llava() -> Any:
    eyes = hf.CLIPVisionConfig(
        **{k: v for k, v in SIZES.items() if k != "vocab_size"}, image_size=16, patch_size=8
    )
    text = hf.LlamaConfig(**GROUPED)
    return hf.LlavaConfig(vision_config=eyes, text_config=text, image_token_index=IMAGE)


ZOO: dict[str, Species] = {
    species.name: species
    for species in (
        Species("GPT-2", hf.GPT2LMHeadModel, gpt2, ("transformer.h",)),
        Species("Llama", hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**GROUPED)),
        Species(
            "Llama, tied head",
            hf.LlamaForCausalLM,
            lambda: hf.LlamaConfig(**GROUPED, tie_word_embeddings=True),
        ),
        Species("Qwen2, sliding window", hf.Qwen2ForCausalLM, qwen2),
        Species("Qwen3", hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**GROUPED, head_dim=8)),
        Species(
            "Gemma",
            hf.GemmaForCausalLM,
            lambda: hf.GemmaConfig(**GROUPED, head_dim=8),
            limit=1e-6,
        ),
        Species(
            "Gemma 3",
            hf.Gemma3ForCausalLM,
            lambda: hf.Gemma3TextConfig(
                **GROUPED, head_dim=8, sliding_window=4, layer_types=MIXED_ATTENTION
            ),
            limit=1e-6,
        ),
        Species("Gemma 3n", hf.Gemma3nForCausalLM, gemma3n, limit=1e-5),
        Species(
            "Mistral",
            hf.MistralForCausalLM,
            lambda: hf.MistralConfig(**GROUPED, sliding_window=4),
        ),
        Species(
            "Mixtral",
            hf.MixtralForCausalLM,
            lambda: hf.MixtralConfig(**EXPERTS, num_local_experts=4),
            limit=1e-6,
        ),
        Species("Qwen3 MoE", hf.Qwen3MoeForCausalLM, qwen3_moe, limit=1e-6),
        Species("DeepSeek-V3", hf.DeepseekV3ForCausalLM, deepseek, limit=1e-6),
        Species(
            "BERT",
            hf.BertForMaskedLM,
            lambda: hf.BertConfig(**SIZES, **NO_DROPOUT),
            ("bert.encoder.layer",),
        ),
        Species(
            "RoBERTa",
            hf.RobertaForSequenceClassification,
            lambda: hf.RobertaConfig(**SIZES, **NO_DROPOUT),
            ("roberta.encoder.layer",),
        ),
        Species(
            "T5",
            hf.T5ForConditionalGeneration,
            t5,
            ("encoder.block", "decoder.block"),
            lambda: {**words(), **words("decoder_input_ids", 5)},
        ),
        Species(
            "BART",
            hf.BartForConditionalGeneration,
            lambda: hf.BartConfig(**TWO_TOWERS),
            ("encoder.layers", "decoder.layers"),
            lambda: {**words(), **padding(), **words("decoder_input_ids", 5)},
        ),
        Species(
            "Mamba",
            hf.MambaForCausalLM,
            lambda: hf.MambaConfig(
                vocab_size=WORDS,
                hidden_size=32,
                num_hidden_layers=4,
                state_size=4,
                use_cache=False,
            ),
            ("backbone.layers",),
            limit=1e-6,
        ),
        Species(
            "ViT",
            hf.ViTForImageClassification,
            lambda: hf.ViTConfig(
                **{k: v for k, v in SIZES.items() if k != "vocab_size"},
                **NO_DROPOUT,
                image_size=16,
                patch_size=4,
            ),
            ("layers",),
            lambda: signal("pixel_values", 3, 16, 16),
        ),
        Species(
            "Whisper",
            hf.WhisperForConditionalGeneration,
            whisper,
            ("encoder.layers", "decoder.layers"),
            lambda: {**signal("input_features", 8, 20), **words("decoder_input_ids", 5)},
        ),
        Species(
            "Wav2Vec2",
            hf.Wav2Vec2ForCTC,
            wav2vec2,
            ("encoder.layers",),
            lambda: signal("input_values", 400),
        ),
        Species(
            "LLaVA",
            hf.LlavaForConditionalGeneration,
            llava,
            ("language_model.layers",),
            picture_and_words,
        ),
    )
}


def describe_layers(species: Species, stages: int, *, has_example: bool) -> str:
    """Split by layers and compare with the unsplit model: "yes", or what prevents it."""
    example = species.build()
    given = ((), example.kwargs) if has_example else ()
    return _describe(
        species, example, lambda: split_layers(example.model, example.lists, stages, *given)
    )


def describe_traced(species: Species, stages: int) -> str:
    """Split by tracing and compare with the unsplit model: "yes", or what prevents it."""
    example = species.build()
    return _describe(
        species, example, lambda: split_traced(example.model, (), example.kwargs, stages=stages)
    )


def _describe(species: Species, example: Example, split: Callable[[], Pipe]) -> str:
    try:
        pipe = split()
        found = pipe(**example.kwargs)
        expected = example.model(**example.kwargs)
        assert type(found) is type(expected)
        _assert_near(first_tensor(found), first_tensor(expected), species.limit)
        assert_same_names(example.model, pipe)
        assert_same_gradients(example.model, pipe, (), example.kwargs, limit=species.limit)
    except PenstockError as error:
        return _shorten(str(error))
    return "yes"


def _shorten(message: str) -> str:
    """Return what is wrong, without where in the step it was and what to do."""
    for end in (";", "\n", " (", ". "):
        message = message.partition(end)[0]
    return message.rpartition("Error: ")[2].replace("|", "/")


def _assert_near(found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


HEADER = """\
# Which models split, and how

Small models, built from the configurations of the current `transformers` release, split in four
ways: into 2 and into 4 stages by layers, with an example of the inputs; into 4 without one; and
into 2 by tracing. "yes" says that outputs, gradients (1F1B and ZBV), names and parameters are
those of the unsplit model; anything else is the error that the user gets. This table is written by
`python -m tests.splitting.zoo`, and a test holds it to what is found.

| model | class | 2 by layers | 4 by layers | 4 without an example | traced |
|---|---|---|---|---|---|
"""


def find_layers(species: Species) -> tuple[str, str, str]:
    """Return the three columns of the table about a split by layers."""
    return (
        describe_layers(species, 2, has_example=True),
        describe_layers(species, 4, has_example=True),
        describe_layers(species, 4, has_example=False),
    )


def write_row(species: Species, columns: tuple[str, ...]) -> str:
    """Return one line of the table."""
    return f"| {species.name} | `{species.kind.__name__}` | {' | '.join(columns)} |"


def write_table(zoo: Mapping[str, Species]) -> str:
    """Return the whole page."""
    rows = []
    for species in zoo.values():
        logging.getLogger(__name__).info("%s", species.name)
        rows.append(write_row(species, (*find_layers(species), describe_traced(species, 2))))
    return HEADER + "\n".join(rows) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(write_table(ZOO))
