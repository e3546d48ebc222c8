"""Where to cut a model so that its slowest stage is fastest, by the measured cost of layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import ArgumentError
from penstock.ir.placement import Placement
from penstock.measuring.layers import measure_pieces
from penstock.measuring.optimizer_state import MakeOptimizer
from penstock.planner.partition.partition import Partition, partition
from penstock.planner.partition.pieces import Piece
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.by_layers.units import find_units
from penstock.splitting.by_tracing.traced import split_into_pieces

__all__ = ["balance"]


def balance(
    model: nn.Module,
    *,
    layers: str | Sequence[str] | None = None,
    placement: Placement,
    example: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    target: Any = None,
    weights: Sequence[float] | None = None,
    memory: float | Sequence[float] | None = None,
    in_flight: int | Sequence[int] = 1,
    optimizer: MakeOptimizer | None = None,
    device: torch.device | str | None = None,
) -> Partition:
    """Find how many layers each stage gets: `split(model, layers=..., stages=found.sizes)`.

    Without `layers` the model is traced, and the pieces of its graph replace them. They are
    measured on one microbatch, which is `example`, `example_kwargs` and `target`, on the model's
    own device. What the model does before and after the layers counts with the first and the
    last one, and so does the loss. `weights`, one per layer, replace the measurement.

    `memory` caps the bytes of each rank: parameters, gradients of those that are trained, what
    `optimizer` holds for them (as by `measure`), and the activations of `in_flight` microbatches;
    see `partition`.
    """
    args, kwargs = tuple(example), dict(example_kwargs or {})
    if weights is None and loss is None:
        raise ArgumentError(
            "balance needs a loss to measure the layers, or weights (got neither); give one"
        )
    if layers is None:
        names, pipe = split_into_pieces(model, args, kwargs, placement.num_stages)
    else:
        lists = [layers] if isinstance(layers, str) else list(layers)
        names = find_units(model, lists).layers
        known = (args, kwargs) if args or kwargs else (None, None)
        pipe = split_layers(model, lists, [1] * len(names), *known)
    if weights is not None:
        if len(weights) != len(names):
            raise ArgumentError(
                f"weights must have one value per layer (got {len(weights)} for {len(names)} "
                "layers)"
            )
        pieces = [Piece.of_weight(n, w) for n, w in zip(names, weights, strict=True)]
    else:
        assert loss is not None, "there is a loss, or there are weights"
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
    return partition(pieces, placement, memory=memory, in_flight=in_flight)
