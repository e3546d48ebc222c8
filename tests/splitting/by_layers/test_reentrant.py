"""Layers in checkpoints of the old kind, whose gradients do not come back from other stages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import ModelError
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.by_layers.reentrant import is_in_reentrant_checkpoint
from penstock.splitting.pipe import Pipe


class Model(nn.Module):
    """Runs its layers in a checkpoint."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.is_reentrant = is_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return x


def split(model: nn.Module, stages: int) -> Pipe:
    return split_layers(model, ["layers"], stages, (torch.ones(1, 2),), {})


def test_only_reentrant_checkpoints_are_found() -> None:
    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(is_in_reentrant_checkpoint())
        return x * 2

    def run(call: Callable[..., Any], **settings: Any) -> bool:
        found.clear()
        call(look, torch.ones(1, requires_grad=True), **settings)
        return found[0]

    found: list[bool] = []
    assert run(checkpoint, use_reentrant=True)
    assert not run(checkpoint, use_reentrant=False)
    assert not run(torch.no_grad()(lambda call, x: call(x)))


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpoints_are_refused_where_gradients_go_between_stages() -> None:
    # A remote layer returned its value inside of the checkpoint, where no graph is recorded: the
    # gradients of all earlier layers were wrong, with nothing but a warning.
    pipe = split(Model(is_reentrant=True), 2)
    message = (
        "'layers.0' is called by a checkpoint with use_reentrant=True, which sends no gradients "
        "to other stages; checkpoint with use_reentrant=False"
    )
    with pytest.raises(ModelError) as caught:
        pipe.run_detached(torch.ones(1, 2))
    assert str(caught.value) == message
    with torch.no_grad(), pytest.warns(UserWarning, match="None of the inputs"):
        assert pipe(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize(("is_reentrant", "stages"), [(True, 1), (False, 1), (False, 2)])
def test_other_checkpoints_work_unchanged(is_reentrant: bool, stages: int) -> None:
    model = Model(is_reentrant=is_reentrant)
    output = split(model, stages)(torch.ones(1, 2))
    torch.autograd.backward(output.sum())
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


class Added(nn.Module):
    """Returns something else from its checkpoints than its layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: self.layers[0](x) + x, x, use_reentrant=True)
        result: torch.Tensor = self.layers[1](x)
        return result


def test_a_value_from_the_middle_of_a_reentrant_checkpoint_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'layers\.0' is called by a checkpoint with"):
        split(Added(), 2).run_detached(torch.ones(1, 2, requires_grad=True))
