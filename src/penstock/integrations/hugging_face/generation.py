"""Greedy generation by a pipeline: each stage keeps the keys and values of its own layers.

    rank 0   prompt 0   prompt 1   token 0.0   token 1.0   ...
    rank 1              prompt 0   prompt 1    token 0.0   ...

A step runs forward only. Its microbatches are groups of sequences with a cache each, so that
several are in flight at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import nn

from penstock.errors import ArgumentError
from penstock.integrations.requirements import needs
from penstock.splitting.by_layers.layer_stage import FirstLayerStage, LayerStage
from penstock.training.batch.batch import unwrap
from penstock.training.pipeline import Pipeline

_NAME = "penstock.integrations.hugging_face.generation"
with needs("transformers", by=_NAME, extra="hugging-face"):
    from transformers import DynamicCache

__all__ = ["generate"]


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
    eos_token_id: int | None = None,
    pad_token_id: int = 0,
) -> torch.Tensor:
    """Return the prompts with the tokens that are most likely to follow, as `model.generate` does.

    `config` is that of the model, which was split by layers and has a decoder only. Prompts have
    one length. Every rank calls this with the same prompts and gets the same tokens. A sequence
    that has ended is filled with `pad_token_id`.
    """
    groups = min(pipeline.schedule.microbatches, len(input_ids))
    was_training = {index: module.training for index, module in pipeline.modules.items()}
    pipeline.eval()
    try:
        with _caching(pipeline, config, groups):
            return _decode(pipeline, input_ids, groups, max_new_tokens, eos_token_id, pad_token_id)
    finally:
        for index, mode in was_training.items():
            pipeline.modules[index].train(mode)


def _decode(
    pipeline: Pipeline,
    input_ids: torch.Tensor,
    groups: int,
    max_new_tokens: int,
    eos_token_id: int | None,
    pad_token_id: int,
) -> torch.Tensor:
    words = new = input_ids
    ended = torch.zeros(len(words), dtype=torch.bool, device=words.device)
    for _ in range(max_new_tokens):
        output = pipeline.evaluate(input_ids=new, microbatches=groups).outputs
        best = None if output is None else output.logits[:, -1].argmax(-1).tolist()
        found = next(tokens for tokens in pipeline.exchange(best) if tokens is not None)
        chosen = torch.tensor(found, device=words.device).masked_fill(ended, pad_token_id)
        new = chosen[:, None]
        words = torch.cat([words, new], 1)
        if eos_token_id is not None:
            ended |= chosen == eos_token_id
            if ended.all():
                break
    return words


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
