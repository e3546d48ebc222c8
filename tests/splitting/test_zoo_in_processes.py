"""Real architectures in real processes, which take their time to load the library."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.splitting.by_layers.layers import split_layers
from tests.models import differences
from tests.processes import Processes
from tests.splitting.checking import gradients, squares
from tests.splitting.zoo import ZOO


def train_species(_rank: int, name: str) -> dict[str, torch.Tensor]:
    """Train a real architecture on two ranks, each with two stages."""
    example = ZOO[name].build()
    pipe = split_layers(example.model, example.lists, 4, (), example.kwargs)
    pipeline = ps.Pipeline(pipe, "ZBV", microbatches=2, loss=squares, group=dist.group.WORLD)
    rows = len(next(iter(example.kwargs.values())))
    for _ in range(2):
        pipeline.step(**example.kwargs, target=torch.zeros(rows))
    return {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama, tied head", "T5", "LLaVA"])
def test_real_architectures_in_processes(two_processes: Processes, name: str) -> None:
    example = ZOO[name].build()
    for _ in range(2):
        torch.autograd.backward(squares(example.model(**example.kwargs)))
    first = {p: n for n, p in reversed(list(_all_names(example.model)))}
    names = {n: first[p] for n, p in _all_names(example.model)}
    seen: dict[str, torch.Tensor] = {}
    for held in two_processes.run(train_species, name):
        for key, gradient in held.items():
            assert torch.equal(seen.setdefault(names[key], gradient), gradient), key
    found = {key: gradient for key, gradient in seen.items() if gradient.count_nonzero()}
    assert differences(found, gradients(example.model)) == {}


def _all_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))
