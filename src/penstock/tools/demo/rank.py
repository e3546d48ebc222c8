"""Where a rank trains: its pipeline on its device, and what that takes of its memory."""

import torch
import torch.distributed as dist
from torch import nn

from penstock.measuring.memory_meters import gauge_for
from penstock.measuring.optimizer_state import count_optimizer_bytes
from penstock.tools.demo.candidates import DemoCandidate
from penstock.tools.demo.task import (
    Task,
    choose_device,
    draw_batches,
    make_optimizer,
    make_stages,
)
from penstock.tools.verify.gpt import next_token_loss
from penstock.training.pipeline import Pipeline

__all__ = ["LONGEST_SILENCE", "count_held_bytes", "make_pipeline"]

# A rank that says nothing for so many seconds is given up; a step takes a fraction of one.
LONGEST_SILENCE = 600.0


def make_pipeline(lesson: Task, course: DemoCandidate) -> Pipeline:
    """The lesson's model, cut and run as a course says; this process is one of its ranks."""
    rank = dist.get_rank()
    device = choose_device(lesson, rank)
    parts = make_stages(lesson, course.sizes)
    stages = [parts[part] for part in course.schedule.dataflow.parts]
    for stage in course.schedule.placement.stages(rank):
        stages[stage].to(device)
    return Pipeline(
        stages, course.schedule, loss=next_token_loss, group=dist.group.WORLD, device=device
    )


def count_held_bytes(lesson: Task, pipeline: Pipeline) -> float:
    """The most bytes that this rank holds during a step, its optimizer's state included.

    Counted in a step after which the model is as it was; every rank takes part.
    """
    device = choose_device(lesson, dist.get_rank())
    batch = next(draw_batches(lesson, device))

    def step() -> None:
        pipeline.step(batch.tokens, target=batch.target)

    # The first step learns what is sent, and leaves no gradients behind for the second.
    step()
    _forget_gradients(pipeline)
    reading = gauge_for(device).watch(step)
    _forget_gradients(pipeline)
    return reading.peak - reading.before + _resident_bytes(pipeline)


def _forget_gradients(pipeline: Pipeline) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None


def _resident_bytes(pipeline: Pipeline) -> int:
    """Parameters and what the optimizer keeps of them; a step makes the gradients."""
    modules = nn.ModuleList(pipeline.modules.values())
    parameters = sum(_bytes(parameter) for parameter in modules.parameters())
    return parameters + count_optimizer_bytes(modules, make_optimizer)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
