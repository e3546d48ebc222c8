"""Small models that tests of the running half share, and what the unsplit model would give."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from penstock.schedules.registry import find_family

__all__ = [
    "WIDTH",
    "Reference",
    "copy_blocks",
    "cut",
    "differences",
    "gradients_of",
    "make_batch",
    "make_blocks",
    "make_stages",
    "mean_loss",
    "run_reference",
    "sum_loss",
]

WIDTH = 16
Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """What the unsplit model gives for a whole batch."""

    loss: float
    output: torch.Tensor
    gradients: dict[str, torch.Tensor]


def make_blocks(count: int = 8, width: int = WIDTH) -> list[nn.Module]:
    """Linear and GELU, `count` times, in float64 and with the same numbers every time."""
    generator = torch.Generator().manual_seed(count)
    blocks: list[nn.Module] = []
    for _ in range(count):
        block = nn.Sequential(nn.Linear(width, width), nn.GELU()).double()
        for parameter in block.parameters():
            with torch.no_grad():
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values / width**0.5)
        blocks.append(block)
    return blocks


def make_batch(
    rows: int = 16, width: int = WIDTH, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make an input and a target with `rows` rows."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    # Each with memory of its own, as batches have.
    return both[0].clone(), both[1].clone()


def copy_blocks(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The same numbers in new parameters."""
    return [deepcopy(block) for block in blocks]


def cut(blocks: Sequence[nn.Module], num_stages: int) -> list[nn.Sequential]:
    """The blocks in as many stages, the earlier ones longer where it does not come out even."""
    bounds = [round(len(blocks) * stage / num_stages) for stage in range(num_stages + 1)]
    return [nn.Sequential(*blocks[a:b]) for a, b in pairwise(bounds)]


def make_stages(family: str, ranks: int, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Make the stages of a family on `ranks` ranks, as `Pipeline` takes them.

    DualPipe runs the whole model in both directions, so its stages appear twice.
    """
    if family == "DualPipe":
        parts: list[nn.Module] = [*cut(blocks, ranks)]
        return [*parts, *parts]
    return [*cut(blocks, ranks * find_family(family).stages_per_rank)]


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean of the squared differences."""
    return nn.functional.mse_loss(output, target)


def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The sum of the squared differences."""
    return nn.functional.mse_loss(output, target, reduction="sum")


def run_reference(
    blocks: Sequence[nn.Module],
    batch: torch.Tensor,
    target: torch.Tensor,
    loss: Loss = mean_loss,
) -> Reference:
    """Loss, output and gradients of the unsplit model; the blocks are left as they are."""
    model = nn.Sequential(*copy_blocks(blocks))
    model.zero_grad()
    output = model(batch)
    value = loss(output, target)
    torch.autograd.backward(value)
    return Reference(value.item(), output.detach(), gradients_of(model.named_parameters()))


def gradients_of(
    parameters: Iterable[tuple[str, nn.Parameter]],
) -> dict[str, torch.Tensor]:
    """The gradients by name, where there are any."""
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def differences(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], limit: float = 1e-12
) -> dict[str, float]:
    """Where the two differ by more than the limit, and by how much; infinity where one lacks."""
    far = {name: float("inf") for name in found.keys() ^ expected.keys()}
    for name in found.keys() & expected.keys():
        distance = float((found[name] - expected[name]).abs().max())
        if not distance <= limit:
            far[name] = distance
    return far
