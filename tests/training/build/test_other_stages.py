"""The memory of a model's other stages, once each rank has built its own."""

import gc
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from tests.models import mean_loss
from tests.processes import Processes

WIDTH, ROWS = 4, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def split(way: str) -> ps.Pipe | list[nn.Module]:
    model = Model()
    if way == "list":
        return [nn.Sequential(*model.layers[:2]), nn.Sequential(*model.layers[2:])]
    example = (torch.randn(ROWS // 4, WIDTH),)
    layers = "layers" if way == "layers" else None
    return ps.split(model, layers=layers, stages=2, example=example)


def weights_alive(_: int, way: str) -> dict[int, bool]:
    """Return of every stage whether its weights are in memory after a step."""
    stages = split(way)
    modules = stages.stages if isinstance(stages, ps.Pipe) else stages
    weights = {index: [ref(p) for p in stage.parameters()] for index, stage in enumerate(modules)}
    assert all(weights.values())
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=4, loss=mean_loss, group=dist.group.WORLD)
    with pipeline:
        del stages, modules
        batch = torch.ones(ROWS, WIDTH)
        pipeline.step(batch, target=batch)
        gc.collect()
        return {
            index: any(weight() is not None for weight in found)
            for index, found in weights.items()
        }


@pytest.mark.parametrize("way", ["layers", "traced", "list"])
def test_a_rank_keeps_the_weights_of_its_own_stages_only(
    two_processes: Processes, way: str
) -> None:
    # A pipeline kept all modules that it had been given, so that every rank held the whole model
    # for as long as it trained.
    assert two_processes.run(weights_alive, way) == [{0: True, 1: False}, {0: False, 1: True}]
