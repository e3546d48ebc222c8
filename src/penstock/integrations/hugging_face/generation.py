"""Generation by a pipeline, greedy or sampled; each stage has a cache for its own layers.

    rank 0   prompt 0   prompt 1   token 0.0   token 1.0   ...
    rank 1              prompt 0   prompt 1    token 0.0   ...

A step runs forward only. Its microbatches are groups of sequences with a cache each, so that
several are in flight at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import nn

from penstock.errors import ArgumentError
from penstock.integrations.requirements import needs
from penstock.splitting.by_layers.layer_stage import FirstLayerStage, LayerStage
from penstock.training.batch.batch import unwrap
from penstock.training.pipeline import Pipeline

with needs(
    "transformers", by="penstock.integrations.hugging_face.generation", extra="hugging-face"
):
    from transformers import (
        DynamicCache,
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

__all__ = ["Sampling", "generate"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: from the `top_k` likeliest, or from those that sum up to `top_p`.

    Draws come from `generator`, torch's own if it is None, which must be in the same state on
    every rank and then is so afterwards.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None


class _StageCache(DynamicCache):
    """The cache of one stage, whose layers speak for those of other stages.

    The model's code asks the first layer how long the sequence is, which is empty here if another
    stage has that layer.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._filled: list[int] = []

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Add the keys and values of a layer of this stage."""
        if layer_idx not in self._filled:
            self._filled.append(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens the cache has."""
        length: int = super().get_seq_length(self._own(layer_idx))
        return length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length of keys, and their offset, for layers of the kind of this one."""
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, self._own(layer_idx))
        return sizes

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the first new token."""
        offset: int = super().get_query_offset(self._own(layer_idx))
        return offset

    def _own(self, layer_idx: int) -> int:
        """Return a layer of this stage like another layer, if there is one yet."""
        if layer_idx in self._filled or not self._filled:
            return layer_idx
        kinds = self.is_sliding
        alike = [own for own in self._filled if kinds[own] == kinds[layer_idx]]
        return (alike or self._filled)[0]


def generate(
    pipeline: Pipeline,
    config: Any,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    attention_mask: torch.Tensor | None = None,
    sampling: Sampling | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int = 0,
) -> torch.Tensor:
    """Return the prompts with the tokens that follow, as `model.generate` does.

    `config` is that of the model, which was split by layers and has a decoder only. Prompts of
    several lengths are filled up at the left, where `attention_mask` has zeros. Without
    `sampling` the likeliest token follows. Every rank calls this with the same prompts and gets
    the same tokens. A sequence that has ended is filled with `pad_token_id`.
    """
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        raise ArgumentError(
            "shorter prompts must be filled up at the left (got a row whose attention_mask ends "
            "with 0); use a tokenizer with padding_side='left'"
        )
    groups = min(pipeline.schedule.microbatches, len(input_ids))
    was_training = {index: module.training for index, module in pipeline.modules.items()}
    pipeline.eval()
    choose = _likeliest if sampling is None else _Draw(sampling)
    words = new = input_ids
    ended = torch.zeros(len(words), dtype=torch.bool, device=words.device)
    try:
        with _caching(pipeline, config, groups):
            for _ in range(max_new_tokens):
                found = _follow(pipeline, choose, words, new, attention_mask, groups)
                chosen = found.to(words.device).masked_fill(ended, pad_token_id)
                new = chosen[:, None]
                words = torch.cat([words, new], 1)
                if attention_mask is not None:
                    attention_mask = nn.functional.pad(attention_mask, (0, 1), value=1)
                if eos_token_id is not None:
                    ended |= chosen == eos_token_id
                    if ended.all():
                        break
    finally:
        for index, mode in was_training.items():
            pipeline.modules[index].train(mode)
    if isinstance(choose, _Draw):
        choose.agree(pipeline)
    return words


def _follow(
    pipeline: Pipeline,
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    words: torch.Tensor,
    new: torch.Tensor,
    attention_mask: torch.Tensor | None,
    groups: int,
) -> torch.Tensor:
    """Run the new tokens through all stages, and return the next one of every sequence."""
    given: dict[str, Any] = {"input_ids": new}
    if attention_mask is not None:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        given["attention_mask"] = attention_mask
        given["position_ids"] = positions[:, -new.shape[1] :]
    output = pipeline.evaluate(**given, microbatches=groups).outputs
    # One rank has the last stage, and chooses for all.
    own = None if output is None else choose(words, output.logits[:, -1]).tolist()
    return torch.tensor(next(found for found in pipeline.exchange(own) if found is not None))


def _likeliest(words: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    del words
    return logits.argmax(-1)


class _Draw:
    """Draws tokens on the rank of the last stage, by the library's own filters."""

    def __init__(self, sampling: Sampling) -> None:
        steps: list[Any] = []
        if sampling.temperature != 1:
            steps.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            steps.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1:
            steps.append(TopPLogitsWarper(sampling.top_p))
        self._filter: Any = LogitsProcessorList(steps)
        self._generator = sampling.generator
        self._device: torch.device | None = None

    def __call__(self, words: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self._device = logits.device
        kept: torch.Tensor = self._filter(words.to(logits.device), logits.float())
        shares = kept.softmax(-1)
        return shares.multinomial(1, generator=self._generator)[:, 0]

    def agree(self, pipeline: Pipeline) -> None:
        """Give the generators of all ranks the state of the one that was drawn from."""
        generator = self._generator
        if generator is None and self._device is not None and self._device.type != "cpu":
            # Only this rank draws from its device's generator.
            pipeline.exchange(None)
            return
        own = generator.get_state() if generator is not None else torch.get_rng_state()
        states = pipeline.exchange(None if self._device is None else own.tolist())
        state = next((found for found in states if found is not None), None)
        if state is None:
            return
        drawn = torch.tensor(state, dtype=torch.uint8)
        if generator is not None:
            generator.set_state(drawn)
        else:
            torch.set_rng_state(drawn)


@contextmanager
def _caching(pipeline: Pipeline, config: Any, groups: int) -> Iterator[None]:
    """Give every stage of this process a cache per group of sequences, meanwhile."""
    stages: list[FirstLayerStage | LayerStage] = []
    for stage in map(unwrap, pipeline.modules.values()):
        if not isinstance(stage, FirstLayerStage | LayerStage):
            raise ArgumentError(
                f"stages that generate must come from a split by layers (got "
                f"{type(stage).__name__}); split the model with layers="
            )
        stages.append(stage)
    try:
        for stage in stages:
            # Each stage runs the groups in their order.
            stage.run_model_by(_with_caches([_StageCache(config) for _ in range(groups)]))
        yield
    finally:
        for stage in stages:
            stage.run_model_by(None)


def _with_caches(caches: list[_StageCache]) -> Callable[..., Any]:
    turns = cycle(caches)

    def run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = model(*args, **kwargs, past_key_values=next(turns), use_cache=True)
        # The cache stays here.
        return type(output)(logits=output.logits)

    return run
