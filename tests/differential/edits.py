"""What users do between steps: optimizers, weights that change, parts that are frozen, hooks."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tests.differential.case import Edit
from tests.differential.losses import LossFunction
from tests.differential.model.blocks import first_linear, reweigh
from tests.differential.ways import WAYS

__all__ = ["EDITS", "edit"]

_RATE = 0.1


def edit(change: Edit, parts: Sequence[nn.Module], loss: LossFunction) -> None:
    """Do to a model, or to its loss, what is done before a step.

    What is asked of a pipeline, such as an evaluation, is not done here.
    """
    if change.kind in ("scaled", "outputs") or (change.kind in WAYS and change.kind != "break"):
        return
    if change.kind in ("fail", "break"):
        # After a step that failed, users begin again from where they were. Other ranks have worked
        # on what the failing one sent in place of its results, a loss with parameters too.
        change = Edit("zero")
        parts = [*parts, loss] if isinstance(loss, nn.Module) else parts
    if change.kind == "late":
        loss.is_late = True  # type: ignore[attr-defined]  # a loss that takes notice of it
    elif change.kind in _ON_ALL:
        _ON_ALL[change.kind](list(dict.fromkeys(p for part in parts for p in part.parameters())))
    else:
        EDITS[change.kind](parts[change.part])


def _clear(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _descend(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-_RATE)
    _clear(parameters)


def _layer(part: nn.Module) -> nn.Linear:
    layer = first_linear(part)
    assert layer is not None, "weights are changed where there are any"
    return layer


def _transpose(part: nn.Module) -> None:
    """Other numbers in the same memory: the same address with other strides."""
    weight = _layer(part).weight
    weight.data = weight.data.t()


def _renew(part: nn.Module) -> None:
    weight = _layer(part).weight
    weight.data = 1.1 * weight.data


def _write(part: nn.Module) -> None:
    with torch.no_grad():
        _layer(part).weight[0].mul_(1.5)


def _replace(part: nn.Module) -> None:
    layer = _layer(part)
    layer.weight = nn.Parameter(0.9 * layer.weight.detach(), layer.weight.requires_grad)


def _hook(part: nn.Module) -> None:
    weight = _layer(part).weight
    if weight.requires_grad:
        weight.register_hook(lambda gradient: 0.5 * gradient)  # type: ignore[no-untyped-call]  # untyped upstream


_ON_ALL: dict[str, Callable[[list[nn.Parameter]], None]] = {"zero": _clear, "sgd": _descend}
EDITS: dict[str, Callable[[nn.Module], object]] = {
    "transpose": _transpose,
    "renew": _renew,
    "write": _write,
    "replace": _replace,
    "hook": _hook,
    "reweigh": lambda part: reweigh("weight_norm", _layer(part)),
    "freeze": lambda part: part.requires_grad_(False),
    "thaw": lambda part: part.requires_grad_(),
    "still": lambda part: part.eval(),
}
