"""One rank of the demo: its pipeline on its device, and how much memory that takes."""

import torch
import torch.distributed as dist
from torch import nn

from penstock.measuring.memory_meters import meter_for
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

# A rank that reports nothing for this many seconds is given up; a step takes less than one.
LONGEST_SILENCE = 600.0


def make_pipeline(task: Task, candidate: DemoCandidate) -> Pipeline:
    """Return a candidate's pipeline of the task's model; this process is one of its ranks."""
    rank = dist.get_rank()
    device = choose_device(task, rank)
    parts = make_stages(task, candidate.sizes)
    stages = [parts[part] for part in candidate.schedule.dataflow.parts]
    for stage in candidate.schedule.placement.stages(rank):
        stages[stage].to(device)
    # A mean over tokens, of which every row has the same number. Saying so keeps the first steps
    # from holding outputs for a comparison, so that their memory is that of any other step.
    return Pipeline(
        stages,
        candidate.schedule,
        loss=next_token_loss,
        reduction="mean",
        group=dist.group.WORLD,
        device=device,
    )


def count_held_bytes(task: Task, pipeline: Pipeline) -> float:
    """Return the peak bytes of this rank during a step, including the optimizer's state.

    The step leaves the model unchanged; every rank calls this.
    """
    device = choose_device(task, dist.get_rank())
    batch = next(draw_batches(task, device))

    def step() -> None:
        pipeline.step(batch.tokens, target=batch.target)

    # The first step learns the shapes; its gradients are dropped before the second.
    step()
    _forget_gradients(pipeline)
    reading = meter_for(device).measure(step)
    _forget_gradients(pipeline)
    return reading.peak - reading.before + _resident_bytes(pipeline)


def _forget_gradients(pipeline: Pipeline) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None


def _resident_bytes(pipeline: Pipeline) -> int:
    """Return the bytes of parameters and optimizer state; a step adds the gradients."""
    modules = nn.ModuleList(pipeline.modules.values())
    parameters = sum(_bytes(parameter) for parameter in modules.parameters())
    return parameters + count_optimizer_bytes(modules, make_optimizer)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
