"""Small models in float64 with what is hard for a pipeline: skips, ties, frozen parts, pairs.

Part 0 takes tokens. Every part adds up what it is given and passes it on; the last one scores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from penstock.loss.added import add_loss
from penstock.tools.verify.case import Case

__all__ = [
    "MOST_ROWS_MISSING",
    "Model",
    "SoakBatch",
    "Weighing",
    "count_tokens",
    "draw_batch",
    "draw_model",
    "make_case",
]

# How many rows fewer than microbatches a batch may have.
MOST_ROWS_MISSING = 2

_VOCABULARY = 11
_WIDTH = 6
_LONGEST = 7
# The target that every loss ignores.
_IGNORED = -100

# How the losses of microbatches add up to that of the batch.
Weighing: TypeAlias = Literal["rows", "sum", "tokens"]


@dataclass(frozen=True, slots=True)
class Model:
    """The properties of a model; `seed` decides its numbers."""

    seed: int
    parts: int
    is_tied: bool
    frozen: frozenset[int]
    pairs: frozenset[int]
    adding_loss: frozenset[int]
    weighing: Weighing


@dataclass(frozen=True, slots=True)
class SoakBatch:
    """The form of one step's batch; `seed` decides its numbers."""

    seed: int
    rows: int
    length: int


def draw_model(chance: Random, parts: int) -> Model:
    """Draw a model with this number of parts, of which some are trained."""
    return Model(
        seed=chance.getrandbits(32),
        parts=parts,
        is_tied=chance.random() < 0.5,
        frozen=_draw_some(chance, range(parts - 1)),
        pairs=_draw_some(chance, range(parts - 1)),
        adding_loss=_draw_some(chance, range(parts)),
        weighing=chance.choice(["rows", "sum", "tokens"]),
    )


def draw_batch(chance: Random, microbatches: int) -> SoakBatch:
    """Draw a batch of any size, sometimes with fewer rows than microbatches."""
    fewest = max(1, microbatches - MOST_ROWS_MISSING)
    rows = chance.randint(fewest, 2 * microbatches + 3)
    return SoakBatch(chance.getrandbits(32), rows, chance.randint(2, _LONGEST))


def _draw_some(chance: Random, parts: Sequence[int]) -> frozenset[int]:
    share = chance.choice([0.0, 0.0, 0.3])
    return frozenset(part for part in parts if chance.random() < share)


class _Part(nn.Module):
    """One part of the model."""

    def __init__(self, *, gives_pair: bool, adds_loss: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(_WIDTH, _WIDTH)
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.embedding: nn.Embedding | None = None
        self.score: nn.Linear | None = None
        self._gives_pair = gives_pair
        self._adds_loss = adds_loss

    def forward(self, *given: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return vectors or scores of tokens, or of the outputs of other parts."""
        if self.embedding is not None:
            vectors: torch.Tensor = self.embedding(given[0])
            counts = given[0].sum(dim=1)
        else:
            vectors = torch.stack([each for each in given if each.is_floating_point()]).sum(dim=0)
            counts = _zeros(vectors)
            for each in given:
                counts = counts if each.is_floating_point() else counts + each
        vectors = vectors + torch.tanh(self.dense(vectors)) * self.scale
        vectors = vectors * (1 + 0.1 * (counts[:, None, None] % 3))
        if self._adds_loss:
            add_loss(1e-2 * vectors.square().mean())
        if self.score is not None:
            scores: torch.Tensor = self.score(vectors)
            return scores
        return (vectors, counts + 1) if self._gives_pair else vectors


def _zeros(vectors: torch.Tensor) -> torch.Tensor:
    return torch.zeros(vectors.shape[0], dtype=torch.int64)


def make_case(model: Model, batch: SoakBatch) -> Case:
    """Return the model, the same at every call, with a batch of this form."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        parts = _make_parts(model)
        torch.manual_seed(batch.seed)
        tokens, target = torch.randint(_VOCABULARY, (2, batch.rows, batch.length))
        if model.weighing == "tokens":
            # The first token always counts, so that there is something to average.
            is_ignored = torch.rand(target.shape) < 0.4
            is_ignored[0, 0] = False
            target = target.masked_fill(is_ignored, _IGNORED)
    return Case(parts, (tokens,), target, _LOSSES[model.weighing])


def _make_parts(model: Model) -> list[nn.Module]:
    parts = [
        _Part(gives_pair=part in model.pairs, adds_loss=part in model.adding_loss)
        for part in range(model.parts)
    ]
    embedding = parts[0].embedding = nn.Embedding(_VOCABULARY, _WIDTH)
    score = parts[-1].score = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
    if model.is_tied:
        score.weight = embedding.weight
    for part in model.frozen:
        parts[part].requires_grad_(False)
    return [part.double() for part in parts]


def count_tokens(target: torch.Tensor) -> float:
    """Return how many tokens of a target a loss counts."""
    return float((target != _IGNORED).sum())


def _mean_loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=_IGNORED)


def _sum_loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="sum")


_LOSSES: dict[Weighing, Callable[..., torch.Tensor]] = {
    "rows": _mean_loss,
    "sum": _sum_loss,
    "tokens": _mean_loss,
}
