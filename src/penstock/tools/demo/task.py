"""What the demo trains: a small GPT, as uneven as real ones, on a text word by word.

embedding | layer | layer | ... | layer | head        the pieces that stages are made of

The vocabulary is large for the width of the model, so that the embedding holds more than a layer
and the head computes more than a layer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from penstock.assembly import build
from penstock.errors import PipelineError, SizeError
from penstock.tools.demo.text import TextBatch, Words, load_text, sample_batch
from penstock.tools.verify.gpt import Block, Embedding

__all__ = [
    "Task",
    "choose_device",
    "draw_batches",
    "make_optimizer",
    "make_stages",
    "make_task",
]

_LEARNING_RATE = 5e-3


@dataclass(frozen=True, slots=True)
class Task:
    """A training task: the model's sizes, the number of ranks and steps, and the device."""

    ranks: int
    steps: int
    device: str = "cpu"
    layers: int = 6
    microbatches: int = 8
    rows: int = 64
    length: int = 64
    width: int = 64
    heads: int = 4

    @property
    def tokens_per_step(self) -> int:
        """The number of words in a step."""
        return self.rows * self.length

    @property
    def pieces(self) -> tuple[str, ...]:
        """The names of the pieces of the model, in order."""
        return ("embedding", *(f"layer {number}" for number in range(self.layers)), "head")


def make_task(
    *, ranks: int, steps: int, device: str | None = None, family: str | None = None
) -> Task:
    """Return a task that two processor cores finish in a minute, or say what would fit.

    Without a device a GPU is used if there is one. `family` is the schedule to train with.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise PipelineError(
            "device must be available to torch (got cuda, but torch finds no GPU); choose cpu"
        )
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    task = Task(ranks, steps, chosen)
    schedule = build(family or "1F1B", ranks=ranks, microbatches=task.microbatches)
    if schedule.is_forward_only:
        raise PipelineError(
            f"the schedule must have backwards (got {schedule.name}); choose another"
        )
    parts, pieces = schedule.dataflow.num_parts, len(task.pieces)
    if parts > pieces:
        raise SizeError(
            f"the demo's model has {pieces} pieces, too few for the {parts} stages of "
            f"{schedule.name} on {ranks} ranks; use at most {ranks * pieces // parts} ranks"
        )
    return task


def make_stages(task: Task, sizes: Sequence[int]) -> list[nn.Module]:
    """Return stages of these sizes, with the same numbers in every process for every cut.

    >>> [len(stage) for stage in make_stages(Task(ranks=2, steps=1), (5, 3))]
    [5, 3]
    """
    torch.manual_seed(0)
    vocabulary, width = len(Words.of(load_text())), task.width
    pieces: list[nn.Module] = [
        Embedding(vocabulary=vocabulary, width=width, length=task.length),
        *(Block(width=width, heads=task.heads) for _ in range(task.layers)),
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary)),
    ]
    bounds = np.cumsum([0, *sizes]).tolist()
    return [nn.Sequential(*pieces[begin:end]) for begin, end in pairwise(bounds)]


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the whole model, or of the part that a rank has."""
    return torch.optim.AdamW(parameters, lr=_LEARNING_RATE)


def draw_batches(task: Task, device: torch.device) -> Iterator[TextBatch]:
    """Yield the batch of every step, the same in every process."""
    text = load_text()
    numbers = torch.tensor(Words.of(text).encode(text))
    for step in range(task.steps):
        batch = sample_batch(numbers, rows=task.rows, length=task.length, seed=step)
        yield TextBatch(batch.tokens.to(device), batch.target.to(device))


def choose_device(task: Task, rank: int) -> torch.device:
    """Return the device of a rank in this process; ranks share GPUs if there are too few."""
    if task.device != "cuda":
        return torch.device(task.device)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
