"""What a LightningModule consists of: the model that a pipeline trains, and the rest."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torchmetrics import Metric

from penstock.errors import ArgumentError
from penstock.integrations.layout import Layout
from penstock.splitting.original import unguarded

__all__ = ["find_model", "refuse_averages", "rest_of_state", "watch_metrics"]


def find_model(module: pl.LightningModule, name: str | None) -> tuple[str, nn.Module]:
    """Return the name and the model of a module, which has all of its parameters."""
    kind = type(module).__name__
    holders = [
        child for child, inner in module.named_children() if any(True for _ in inner.parameters())
    ]
    own = [parameter for parameter, _ in module.named_parameters(recurse=False)]
    if name is not None and name not in holders:
        raise ArgumentError(
            f"model must name a child of {kind} that has parameters (got {name!r}, and these "
            f"have some: {holders})"
        )
    if own or len(holders) != 1:
        raise ArgumentError(
            f"all parameters of {kind} must be those of one model, which the pipeline splits (got "
            f"the children {holders} and the parameters {own}); put them into one module"
        )
    return holders[0], module.get_submodule(holders[0])


def rest_of_state(module: pl.LightningModule, name: str, model: nn.Module) -> dict[str, Any]:
    """Return the state of a module without that of its model."""
    with unguarded(model):
        state = module.state_dict()
    return {key: value for key, value in state.items() if not key.startswith(f"{name}.")}


def watch_metrics(module: pl.LightningModule, model: nn.Module, layout: Layout) -> None:
    """Have metrics gather over replicas, because all ranks of a pipeline count the same rows."""
    if layout.mesh is None:
        return
    group = layout.mesh.get_group("replica")
    inside = set(model.modules())
    for child in module.modules():
        if isinstance(child, Metric) and child not in inside and child.process_group is None:
            child.process_group = group


def refuse_averages(trainer: pl.Trainer, layout: Layout) -> None:
    """Raise if a callback would save averages of weights, of which each process has a part."""
    if layout.mesh is None or layout.ranks == 1:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # the Trainer sets it
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ArgumentError(
                f"{type(callback).__name__} keeps averages on every process, and those of the "
                "first one only would be in checkpoints; leave it out, or train with "
                "enable_checkpointing=False"
            )
