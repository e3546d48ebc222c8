"""What the demo teaches: a small GPT, uneven as real ones are, and a text word by word.

embedding | layer | layer | ... | layer | head        the pieces that stages are made of

The vocabulary is wide for the width of the model, so that the embedding holds more than a layer
and the head has more to do than a layer.
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
    """What is taught, on how many ranks, for how long and where."""

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
        """How many words a step sees."""
        return self.rows * self.length

    @property
    def pieces(self) -> tuple[str, ...]:
        """The names of the pieces of the model, in order."""
        return ("embedding", *(f"layer {number}" for number in range(self.layers)), "head")


def make_task(
    *, ranks: int, steps: int, device: str | None = None, family: str | None = None
) -> Task:
    """A task that two processor cores learn in a minute, or an error that says what would do.

    Without a device it is a GPU where there is one. `family` is a schedule to train by.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise PipelineError("there is no GPU here that torch can use; choose cpu")
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    task = Task(ranks, steps, chosen)
    schedule = build(family or "1F1B", ranks=ranks, microbatches=task.microbatches)
    if schedule.is_forward_only:
        raise PipelineError(f"{schedule.name} has no backwards to train with; choose another")
    parts, pieces = schedule.dataflow.num_parts, len(task.pieces)
    if parts > pieces:
        raise SizeError(
            f"{schedule.name} on {ranks} ranks wants {parts} stages, but the demo's model has "
            f"{pieces} pieces to make them of; use at most {ranks * pieces // parts} ranks"
        )
    return task


def make_stages(task: Task, sizes: Sequence[int]) -> list[nn.Module]:
    """Stages of so many pieces each; the same numbers in every process, however it is cut.

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
    """The optimizer of the whole model, or of the part that a rank has."""
    return torch.optim.AdamW(parameters, lr=_LEARNING_RATE)


def draw_batches(task: Task, device: torch.device) -> Iterator[TextBatch]:
    """The batch of every step, the same in every process."""
    text = load_text()
    numbers = torch.tensor(Words.of(text).encode(text))
    for step in range(task.steps):
        batch = sample_batch(numbers, rows=task.rows, length=task.length, seed=step)
        yield TextBatch(batch.tokens.to(device), batch.target.to(device))


def choose_device(task: Task, rank: int) -> torch.device:
    """The device of a rank in this process; ranks share GPUs where there are too few."""
    if task.device != "cuda":
        return torch.device(task.device)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
