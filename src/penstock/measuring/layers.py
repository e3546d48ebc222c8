"""The measured costs of every layer of a model, from which plans for any number of ranks start."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.measuring.optimizer_state import MakeOptimizer
from penstock.measuring.stages import measure_closely
from penstock.planner.partition.pieces import Piece
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.by_layers.units import find_units
from penstock.splitting.pipe import Pipe

__all__ = ["measure_layers", "measure_pieces"]

# Costs of a stage that become those of a piece unchanged.
_COLUMNS = (
    "forward",
    "backward_input",
    "backward_weight",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "activation_bytes",
    "weight_stash_bytes",
    "message_bytes",
    "workspace_bytes",
)


def measure_layers(
    model: nn.Module,
    *,
    layers: str | Sequence[str],
    example: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., torch.Tensor],
    target: Any = None,
    optimizer: MakeOptimizer | None = None,
    device: torch.device | str | None = None,
) -> tuple[Piece, ...]:
    """Measure every layer of a model on one microbatch, for `partition` and `search`.

    `layers` names the model's lists of layers, as in `split`. What the model does before and after
    them counts with the first and the last layer, and so does the loss. The state of the optimizer
    is counted from `optimizer`, as in `measure`.
    """
    lists = [layers] if isinstance(layers, str) else list(layers)
    names = find_units(model, lists).layers
    args, kwargs = tuple(example), dict(example_kwargs or {})
    pipe = split_layers(model, lists, [1] * len(names), args, kwargs)
    pieces = measure_pieces(
        pipe,
        names,
        args,
        kwargs,
        loss=loss,
        target=target,
        optimizer=optimizer,
        device=device,
    )
    return tuple(pieces)


def measure_pieces(
    pipe: Pipe,
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[..., torch.Tensor],
    target: Any,
    optimizer: MakeOptimizer | None = None,
    device: torch.device | str | None,
) -> list[Piece]:
    """Make one piece per stage of a pipe, from what the stage costs."""
    found = measure_closely(
        pipe,
        example=args,
        example_kwargs=kwargs,
        loss=loss,
        target=target,
        device=device,
        optimizer=optimizer,
    )
    costs, count = found.costs, len(names)
    columns = {name: costs.per_stage(name, count) for name in _COLUMNS}
    return [
        Piece(
            name,
            **{column: float(values[number]) for column, values in columns.items()},
            host_action=costs.host_action,
        )
        for number, name in enumerate(names)
    ]
