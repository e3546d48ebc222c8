"""Convolutions and embeddings of data-parallel stages: weights are deferred, replicas agree."""

import copy
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from penstock.parallel.replica import replica_of
from penstock.step.stage import Stage
from tests.processes import Processes

Make: TypeAlias = Callable[[nn.Module, DeviceMesh], nn.Module]
MICROBATCHES, STEPS = 4, 3


class Words(nn.Module):
    """Words to numbers: an embedding, a convolution, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.near = nn.Conv1d(4, 4, 2)
        self.out = nn.Linear(4, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(self.near(self.words(words).mT).tanh().mT)
        return output


def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(module.get_submodule("words"), mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def wrap(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, device_mesh=mesh)


def train(rank: int, make: Make) -> tuple[list[list[int]], float]:
    """Return the number of deferred calls per step and microbatch, and the largest error."""
    torch.manual_seed(0)
    plain = Words().double()
    mesh = init_device_mesh("cpu", (2,))
    module = make(copy.deepcopy(plain), mesh)
    stage = Stage(0, module, replica_of(module))
    stage.prepare_split()
    words = torch.randint(7, (2, MICROBATCHES, 3, 5))
    gradients = torch.randn(2, MICROBATCHES, 3, 4, 2, dtype=torch.float64)
    counts = [run_step(stage, words[rank], gradients[rank]) for _ in range(STEPS)]
    for every_word, every_gradient in zip(
        words.flatten(0, 1), gradients.flatten(0, 1), strict=True
    ):
        plain(every_word).backward(STEPS / 2 * every_gradient)
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    wrong = [(_whole(found.grad) - _whole(right.grad)).abs().max() for found, right in pairs]
    return counts, float(max(wrong))


def run_step(stage: Stage, words: torch.Tensor, gradients: torch.Tensor) -> list[int]:
    stage.replica.begin_step()
    stage.replica.unshard()
    counts = []
    for microbatch in range(MICROBATCHES):
        output, _ = stage.forward(microbatch, [], (words[microbatch],), {})
        stage.depart(microbatch, output, [1])
        stage.backward_input(microbatch, [[gradients[microbatch]]])
        counts.append(len(stage._waiting[microbatch]))
    for microbatch in range(MICROBATCHES):
        stage.backward_weight(microbatch)
    stage.replica.reduce_gradients()
    stage.replica.reshard()
    return counts


def _whole(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize(
    ("make", "first"),
    [
        # Weights outside linear layers are found after the first forward, once FSDP gathers them.
        (shard, [1, 3, 3, 3]),
        (wrap, [3, 3, 3, 3]),
    ],
)
def test_weights_of_data_parallel_stages_are_deferred(
    two_processes: Processes, make: Make, first: list[int]
) -> None:
    for counts, wrong in two_processes.run(train, make):
        assert counts == [first, [3] * MICROBATCHES, [3] * MICROBATCHES]
        assert wrong < 1e-12
