"""A small GPT: tokens in, scores for the next token out, cut into any number of stages."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from penstock.errors import SizeError
from penstock.tools.verify.case import Case

__all__ = ["Block", "Embedding", "gpt_case", "gpt_stages", "next_token_loss"]


class Embedding(nn.Module):
    """Tokens and their positions as vectors."""

    def __init__(self, *, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return vectors (rows, length, width) of tokens (rows, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        vectors: torch.Tensor = self.token(tokens) + self.position(positions)
        return vectors


class Block(nn.Module):
    """Causal attention, then a dense layer, each with a residual connection."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dense_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors of the same shape."""
        vectors = vectors + self.projection(self._attend(self.attention_norm(vectors)))
        hidden = F.gelu(self.expand(self.dense_norm(vectors)))
        answer: torch.Tensor = vectors + self.contract(hidden)
        return answer

    def _attend(self, vectors: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(vectors).chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


def gpt_stages(
    num_stages: int,
    *,
    vocabulary: int,
    length: int,
    width: int = 32,
    heads: int = 2,
    layers: int | None = None,
) -> list[nn.Module]:
    """Return the stages in order, by default with one layer each; the last one also scores.

    >>> [len(stage) for stage in gpt_stages(2, vocabulary=9, length=8, layers=5)]
    [4, 4]
    """
    num_layers = num_stages if layers is None else layers
    if num_layers < num_stages:
        raise SizeError(
            f"layers must be at least the number of stages, {num_stages} (got {num_layers}); "
            f"use {num_stages} or more"
        )
    blocks: Sequence[nn.Module] = [Block(width=width, heads=heads) for _ in range(num_layers)]
    # The first stages get the remainder, because the last one also scores.
    bounds = [-(-num_layers * stage // num_stages) for stage in range(num_stages + 1)]
    pieces = [list(blocks[bounds[i] : bounds[i + 1]]) for i in range(num_stages)]
    pieces[0].insert(0, Embedding(vocabulary=vocabulary, width=width, length=length))
    pieces[-1] += [nn.LayerNorm(width), nn.Linear(width, vocabulary)]
    return [nn.Sequential(*piece) for piece in pieces]


def next_token_loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next tokens."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def gpt_case(num_stages: int, *, rows: int, vocabulary: int = 17, length: int = 6) -> Case:
    """Return a tiny GPT with one layer per stage, and random tokens."""
    stages = gpt_stages(num_stages, vocabulary=vocabulary, length=length, width=16)
    tokens, target = torch.randint(vocabulary, (2, rows, length))
    return Case(stages, (tokens,), target, next_token_loss)
