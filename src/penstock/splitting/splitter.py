"""The one function that splits a model, by layers or by tracing."""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from logging import getLogger
from typing import Any, Literal

from torch import nn
from torch.nn.parameter import is_lazy

from penstock.errors import ArgumentError, ModelError
from penstock.splitting.by_layers.example.called_towers import find_called_towers
from penstock.splitting.by_layers.example.own_example import find_own_towers
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.by_layers.towers import count_lists, find_towers
from penstock.splitting.by_tracing.traced import Policy, split_traced
from penstock.splitting.marks import SplitPoint
from penstock.splitting.pipe import Pipe
from penstock.splitting.router_losses import log_router_loss

__all__ = ["split"]

_LOGGER = getLogger(__name__)
# What `layers` is to find the lists of layers though there is an example.
_AUTO = "auto"


def split(
    model: nn.Module,
    *,
    stages: int | Sequence[int] | None = None,
    layers: str | Sequence[str] | None = None,
    at: Mapping[str, SplitPoint] | Sequence[int] | Policy | None = None,
    example: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    shared: Literal["replicate", "transmit"] = "replicate",
) -> Pipe:
    """Cut a model into stages.

    By layers, without tracing: `layers` names one or several lists of modules, and `stages` is
    how many stages to make, or how many layers each of them gets. With `stages` alone, or with
    `layers="auto"`, the lists are found: where most of the parameters are. `print(pipe)` and the
    log say which. An example of the model's arguments is needed only if layers take more than
    inputs and what the layer before returned. `at` with numbers cuts an `nn.Sequential` before
    these positions.

    By tracing, with an example: at calls of `pipe_split` in the model, at module paths (`at` with
    `SplitPoint`s), where a function of the traced graph puts marks (`at`), or into a number of
    `stages` of about equal work, or with the numbers of pieces that `balance` finds. `shared` says
    how stages share a parameter that several of them use; see `split_traced`.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> [list(stage.state_dict()) for stage in split(model, at=[2]).stages]
    [['0.weight', '0.bias'], ['2.weight', '2.bias']]
    >>> split(model, stages=2, example=[torch.ones(3, 4)]).dataflow.edges
    ((0, 1),)
    """
    _require_shapes(model)
    given = None if example is None else tuple(example)
    log_router_loss(model, example_kwargs or {})
    pipe = _split(model, stages, layers, at, given, example_kwargs, shared)
    return pipe.of_model(model)


def _split(
    model: nn.Module,
    stages: int | Sequence[int] | None,
    layers: str | Sequence[str] | None,
    at: Mapping[str, SplitPoint] | Sequence[int] | Policy | None,
    args: tuple[Any, ...] | None,
    example_kwargs: Mapping[str, Any] | None,
    shared: Literal["replicate", "transmit"],
) -> Pipe:
    """Cut a model in the way that these arguments ask for."""
    if isinstance(at, Sequence):
        sizes = _sizes(model, at)
        _refuse("at", stages=stages, layers=layers)
        return split_layers(model, [""], sizes, args, example_kwargs)
    has_example = args is not None or example_kwargs is not None
    if layers is not None or not (has_example or at or stages is None):
        _refuse("layers", at=at)
        if stages is None:
            raise ArgumentError(
                "stages is required with layers; give the number of stages: stages=4"
            )
        lists = _lists(model, layers, stages, args, example_kwargs)
        return split_layers(model, lists, stages, args, example_kwargs)
    if not has_example:
        raise ArgumentError(
            "give the number of stages, or an example of the model's arguments to trace it with: "
            "split(model, stages=4) or split(model, stages=4, example=[batch])"
        )
    return split_traced(model, args or (), example_kwargs, at=at, stages=stages, shared=shared)


def _lists(
    model: nn.Module,
    layers: str | Sequence[str] | None,
    stages: int | Sequence[int],
    args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None,
) -> list[str]:
    """Return the paths of the lists of layers; find them if none are given."""
    if layers is not None and layers != _AUTO:
        return [layers] if isinstance(layers, str) else list(layers)
    least = stages if isinstance(stages, int) else sum(stages)
    if args is None and kwargs is None:
        found = find_towers(model, least)
        if count_lists(model) > 1:
            found = find_own_towers(model, least, found)
    else:
        found = find_called_towers(model, least, args or (), kwargs or {})
    _LOGGER.info("the layers to split between are those of %s", ", ".join(map(repr, found)))
    return found


def _require_shapes(model: nn.Module) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name!r} must have a shape before the model is split (it is lazy and has not "
                "run yet); call the model once"
            )


def _sizes(model: nn.Module, positions: Sequence[int]) -> list[int]:
    """Return how many children of a Sequential are between these positions."""
    if not isinstance(model, nn.Sequential):
        raise ArgumentError(
            f"at with numbers needs an nn.Sequential (got {type(model).__name__}); give layers "
            "or module paths with SplitPoint.BEGINNING or SplitPoint.END"
        )
    bounds = [0, *positions, len(model)]
    if any(start >= end for start, end in pairwise(bounds)):
        raise ArgumentError(
            f"the positions in at must increase between 0 and {len(model)}, the length of the "
            f"Sequential (got {list(positions)})"
        )
    return [end - start for start, end in pairwise(bounds)]


def _refuse(given: str, **others: object) -> None:
    for name, value in others.items():
        if value is not None:
            raise ArgumentError(f"{given} already says where to cut; leave out {name}")
