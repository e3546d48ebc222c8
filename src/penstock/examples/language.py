"""Teaches a small GPT the shipped text: as a pipeline over local processes, and unsplit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.assembly import build
from penstock.errors import PipelineError
from penstock.examples.gpt import gpt_stages, next_token_loss
from penstock.examples.processes import Report, run_on_ranks
from penstock.examples.text import Batch, Letters, load_text, sample_batch
from penstock.ir.schedule import Schedule
from penstock.sim.timeline import Timeline
from penstock.training.pipeline import Pipeline

__all__ = ["Lesson", "Step", "plan_lesson", "train_pipeline", "train_unsplit"]

# A rank that says nothing for so long is given up; a step takes a fraction of a second.
_LONGEST_SILENCE = 180.0
_MICROBATCHES = 8
_FEWEST_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is trained, on how much, and in which order of work."""

    schedule: Schedule
    steps: int
    layers: int
    device: str = "cpu"
    rows: int = 32
    length: int = 64
    width: int = 128
    heads: int = 4
    learning_rate: float = 3e-3

    @property
    def tokens_per_step(self) -> int:
        """How many letters a step sees."""
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was done: its number from 1, its loss and its seconds."""

    number: int
    loss: float
    seconds: float


def plan_lesson(family: str, *, ranks: int, steps: int, device: str) -> Lesson:
    """A lesson of a size that two processor cores do in less than a minute."""
    if device == "cuda" and not torch.cuda.is_available():
        raise PipelineError("there is no GPU here that torch can use; choose cpu")
    schedule = build(family, ranks=ranks, microbatches=_MICROBATCHES)
    layers = max(_FEWEST_LAYERS, schedule.dataflow.num_parts)
    return Lesson(schedule, steps, layers, device)


def train_pipeline(lesson: Lesson, on_step: Callable[[Step], None]) -> Timeline:
    """Train over one local process per rank; the recorded timeline of the last step."""
    timelines = run_on_ranks(
        partial(_train_rank, lesson),
        lesson.schedule.num_ranks,
        seconds=_LONGEST_SILENCE,
        on_report=lambda _rank, step: on_step(step),
    )
    timeline: Timeline = timelines[0]
    return timeline


def _train_rank(lesson: Lesson, report: Report) -> Timeline:
    """What one rank does: every rank sees every batch and takes from it what it needs."""
    rank = dist.get_rank()
    device = _choose_device(lesson, rank)
    parts = _build_model(lesson)
    stages = [parts[part] for part in lesson.schedule.dataflow.parts]
    for stage in lesson.schedule.placement.stages(rank):
        stages[stage].to(device)
    pipeline = Pipeline(
        stages,
        lesson.schedule,
        microbatches=lesson.schedule.microbatches,
        loss=next_token_loss,
        group=dist.group.WORLD,
        device=device,
    )
    optimizer = _optimizer(lesson, pipeline.parameters())
    for number, batch in enumerate(_batches(lesson, device), start=1):
        begin = perf_counter()
        is_last = number == lesson.steps
        result = pipeline.step(batch.tokens, target=batch.target, record=is_last)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss is not None, "every step has a target"
        if rank == 0:
            report(Step(number, result.loss, perf_counter() - begin))
    assert result.timeline is not None, "the last step is recorded"
    return result.timeline


def train_unsplit(lesson: Lesson, on_step: Callable[[Step], None]) -> None:
    """Train the same model on the same batches in one process, without a pipeline."""
    run_on_ranks(
        partial(_train_alone, lesson),
        1,
        seconds=_LONGEST_SILENCE,
        on_report=lambda _rank, step: on_step(step),
    )


def _train_alone(lesson: Lesson, report: Report) -> None:
    device = _choose_device(lesson, 0)
    model = nn.Sequential(*_build_model(lesson)).to(device)
    optimizer = _optimizer(lesson, model.parameters())
    for number, batch in enumerate(_batches(lesson, device), start=1):
        begin = perf_counter()
        loss = next_token_loss(model(batch.tokens), batch.target)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped upstream
        optimizer.step()
        optimizer.zero_grad()
        report(Step(number, loss.item(), perf_counter() - begin))


def _build_model(lesson: Lesson) -> list[nn.Module]:
    """The parts of the model, with the same numbers in every process."""
    torch.manual_seed(0)
    return gpt_stages(
        lesson.schedule.dataflow.num_parts,
        vocabulary=len(Letters.of(load_text())),
        length=lesson.length,
        width=lesson.width,
        heads=lesson.heads,
        layers=lesson.layers,
    )


def _optimizer(lesson: Lesson, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lesson.learning_rate)


def _batches(lesson: Lesson, device: torch.device) -> Iterator[Batch]:
    text = load_text()
    numbers = torch.tensor(Letters.of(text).encode(text))
    for step in range(lesson.steps):
        batch = sample_batch(numbers, rows=lesson.rows, length=lesson.length, seed=step)
        yield Batch(batch.tokens.to(device), batch.target.to(device))


def _choose_device(lesson: Lesson, rank: int) -> torch.device:
    """The device of a rank in this process; ranks share GPUs where there are too few."""
    if lesson.device != "cuda":
        return torch.device(lesson.device)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
