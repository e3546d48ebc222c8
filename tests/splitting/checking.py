"""Checks that a split has the outputs, gradients, names and parameters of the unsplit model."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import penstock as ps
from penstock.splitting.pipe import Pipe

__all__ = ["assert_same_gradients", "assert_same_names", "first_tensor", "gradients", "squares"]

Loss = Callable[..., torch.Tensor]


def first_tensor(output: Any) -> torch.Tensor:
    """Return the first floating-point tensor of any output."""
    tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return next(tensor for tensor in tensors if tensor.is_floating_point())


def squares(output: Any, _target: Any = None) -> torch.Tensor:
    """Return a loss of the first tensor of any output; the target is not used."""
    return first_tensor(output).square().mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of a model and clear them; zeros count as none."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name: gradient for name, gradient in found.items() if gradient.count_nonzero()}


def reference(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss = squares
) -> dict[str, torch.Tensor]:
    """Return the gradients of a copy of the unsplit model."""
    whole = deepcopy(model)
    torch.autograd.backward(loss(whole(*args, **kwargs)))
    return gradients(whole)


def assert_same_gradients(
    model: nn.Module,
    pipe: Pipe,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    schedules: tuple[str, ...] = ("1F1B", "ZBV"),
    microbatches: int = 2,
    limit: float = 1e-12,
) -> None:
    """Assert that the pipe has the model's gradients, whole and in these schedules."""
    given = dict(kwargs or {})
    rows = len(next(leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)))
    expected = reference(model, args, given)
    model.zero_grad()
    for schedule in schedules:
        if schedule == "ZBV" and pipe.num_stages % 2:
            continue
        pipeline = ps.Pipeline(
            pipe, schedule, microbatches=microbatches, loss=squares, reduction="mean"
        )
        pipeline.step(*args, **given, target=torch.zeros(rows))
        found = gradients(model)
        assert found.keys() == expected.keys(), schedule
        for name, gradient in expected.items():
            difference = (found[name] - gradient).abs().max().item()
            scale = 1 + gradient.abs().max().item()
            assert difference <= limit * scale, (schedule, name, difference)


def assert_same_names(model: nn.Module, pipe: Pipe) -> None:
    """Assert that stages together have the model's state, each parameter once or tied."""
    held = [set(stage.state_dict()) for stage in pipe.stages]
    assert set().union(*held) == set(model.state_dict())
    parameters = [set(stage.parameters()) for stage in pipe.stages]
    assert set().union(*parameters) == set(model.parameters())
    tied = {pipe.stages[s].get_parameter(name) for tie in pipe.ties for s, name in tie.places}
    shared = {p for p in model.parameters() if sum(p in own for own in parameters) > 1}
    assert shared == tied
    assert pipe.state_dict().keys() == model.state_dict().keys()
