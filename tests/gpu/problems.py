"""What jobs on several ranks share: blocks on a device, the unsplit model, and one trained step.

Every job runs on a GPU over NCCL and, where it is rehearsed, on the processor over gloo.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.schedules.registry import FAMILIES
from tests.models import differences, mean_loss

__all__ = [
    "EQUAL",
    "LOOPED",
    "PLAIN",
    "SEVERAL",
    "TRAINING",
    "V_SHAPED",
    "Twin",
    "closing",
    "make_batch",
    "make_blocks",
    "widths_of",
]

TRAINING = tuple(name for name in FAMILIES if name != "ForwardOnly")
PLAIN = ("GPipe", "1F1B", "ZB-H1", "ZB-H2")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBV", "V-Half", "V-Min", "DualPipeV", "DualPipe")
SEVERAL = (*LOOPED, *V_SHAPED)
EQUAL = 16
_RATE = 0.05


def widths_of(count: int, *, are_equal: bool) -> list[int]:
    """Return the widths between blocks; the first and the last are equal."""
    between = (
        [EQUAL] * (count - 1) if are_equal else [8 + 4 * (i * 5 % 7) for i in range(count - 1)]
    )
    return [EQUAL, *between, EQUAL]


def make_blocks(widths: Sequence[int], device: torch.device) -> list[nn.Module]:
    """One block between any two widths, in float64, with the same numbers on every rank."""
    generator = torch.Generator().manual_seed(len(widths))
    blocks: list[nn.Module] = []
    for before, after in pairwise(widths):
        block = nn.Sequential(
            nn.LayerNorm(before), nn.Linear(before, after), nn.GELU(), nn.Linear(after, after)
        ).double()
        with torch.no_grad():
            for parameter in block.parameters():
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values / after**0.5)
        blocks.append(block.to(device))
    return blocks


def make_batch(shape: Sequence[int], seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """An input and a target of this shape."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return both[0].clone().to(device), both[1].clone().to(device)


@contextmanager
def closing(pipeline: ps.Pipeline) -> Iterator[ps.Pipeline]:
    """Close a pipeline at the end: NCCL's connections take seconds if they are collected.

    After an error nobody waits for the others, who may have left.
    """
    yield pipeline
    dist.barrier()
    pipeline.close()


@dataclass
class Twin:
    """A model whose stages a pipeline trains, and its copy, which is trained unsplit."""

    model: nn.Module
    copy: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> "Twin":
        """The model and a copy of it."""
        return cls(model, deepcopy(model))

    def step(
        self, pipeline: ps.Pipeline, batch: torch.Tensor, target: torch.Tensor
    ) -> dict[str, float]:
        """Train both by one step; where they differ in this rank's gradients, or in the loss."""
        self.model.zero_grad(set_to_none=True)
        self.copy.zero_grad(set_to_none=True)
        found = pipeline.step(batch, target=target).loss
        expected = mean_loss(self.copy(batch), target)
        torch.autograd.backward(expected)
        far = self.compare(pipeline)
        if found is None or not abs(found - expected.item()) < 1e-12:
            far["loss"] = float("nan") if found is None else found - expected.item()
        self._descend(self.model)
        self._descend(self.copy)
        return far

    def evaluate(
        self, pipeline: ps.Pipeline, batch: torch.Tensor, target: torch.Tensor
    ) -> dict[str, float]:
        """Where the two differ in what they make of a batch, and in its loss."""
        result = pipeline.evaluate(batch, target=target)
        with torch.no_grad():
            output = self.copy(batch)
            expected = mean_loss(output, target).item()
        far = {}
        if result.loss is None or not abs(result.loss - expected) < 1e-12:
            far["loss of evaluation"] = expected
        if result.outputs is not None:
            # Where the model runs in both directions, a rank has the rows of one of them.
            distances = torch.cdist(result.outputs, output).min(dim=1).values
            is_whole = len(distances) == len(output) or pipeline.schedule.name == "DualPipe"
            if not (is_whole and float(distances.max()) < 1e-10):
                far["outputs"] = float(distances.max())
        return far

    def compare(self, pipeline: ps.Pipeline) -> dict[str, float]:
        """Where gradients of this rank's parameters are not those of the copy."""
        own = set(pipeline.parameters())
        names = {name for name, parameter in self.model.named_parameters() if parameter in own}
        assert names, "every rank has parameters"
        found = {n: p.grad for n, p in self.model.named_parameters() if n in names}
        expected = {n: p.grad for n, p in self.copy.named_parameters() if n in names}
        return differences(
            {name: gradient for name, gradient in found.items() if gradient is not None},
            {name: gradient for name, gradient in expected.items() if gradient is not None},
        )

    @staticmethod
    def _descend(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(_RATE * parameter.grad)
