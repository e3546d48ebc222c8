"""Trains the task: as a pipeline over local processes, and unsplit in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from penstock.tools.demo.candidates import DemoCandidate
from penstock.tools.demo.rank import LONGEST_SILENCE, count_held_bytes, make_pipeline
from penstock.tools.demo.task import (
    Task,
    choose_device,
    draw_batches,
    make_optimizer,
    make_stages,
)
from penstock.tools.launcher import Report, run_on_ranks
from penstock.tools.verify.gpt import next_token_loss

__all__ = ["HeldBytes", "TrainedStep", "TrainingReport", "train_pipeline", "train_unsplit"]


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One finished step: its number from 1, its loss, its seconds, and its idle share.

    `bubble` is the share of the step in which ranks were idle; 0 for the unsplit model.
    """

    number: int
    loss: float
    seconds: float
    bubble: float = 0.0


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """The most bytes that a rank holds during a step."""

    rank: int
    bytes: float


# What a training reports while it runs.
TrainingReport: TypeAlias = TrainedStep | HeldBytes


def train_pipeline(
    task: Task, candidate: DemoCandidate, on_report: Callable[[TrainingReport], None]
) -> None:
    """Train in one local process per rank, and report what each holds and every step."""
    run_on_ranks(
        partial(_train_rank, task, candidate),
        task.ranks,
        seconds=LONGEST_SILENCE,
        on_report=lambda _rank, report: on_report(report),
    )


def _train_rank(task: Task, candidate: DemoCandidate, report: Report) -> None:
    """Train one rank; every rank gets every batch and uses what it needs."""
    rank = dist.get_rank()
    pipeline = make_pipeline(task, candidate)
    report(HeldBytes(rank, count_held_bytes(task, pipeline)))
    optimizer = make_optimizer(pipeline.parameters())
    for number, batch in enumerate(draw_batches(task, choose_device(task, rank)), start=1):
        begin = perf_counter()
        result = pipeline.step(batch.tokens, target=batch.target, record=True)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss is not None, "every step has a target"
        assert result.timeline is not None, "every step is recorded"
        if rank == 0:
            seconds = perf_counter() - begin
            report(TrainedStep(number, result.loss, seconds, result.timeline.bubble_rate))


def train_unsplit(task: Task, on_report: Callable[[TrainingReport], None]) -> None:
    """Train the same model on the same batches in this process, without a pipeline."""
    threads = torch.get_num_threads()
    # One thread, as every rank has.
    torch.set_num_threads(1)
    try:
        _train_alone(task, on_report)
    finally:
        torch.set_num_threads(threads)


def _train_alone(task: Task, on_report: Callable[[TrainingReport], None]) -> None:
    device = choose_device(task, 0)
    model = nn.Sequential(*make_stages(task, (len(task.pieces),))).to(device)
    optimizer = make_optimizer(model.parameters())
    for number, batch in enumerate(draw_batches(task, device), start=1):
        begin = perf_counter()
        loss = next_token_loss(model(batch.tokens), batch.target)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped upstream
        optimizer.step()
        optimizer.zero_grad()
        on_report(TrainedStep(number, loss.item(), perf_counter() - begin))
