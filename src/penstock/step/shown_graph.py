"""A forward of an evaluation that keeps its graph, to show what a model's own loss consists of."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.parallel.replica import Replica
from penstock.torch_private import tree_map

__all__ = ["keep_graph", "start_graph"]


@contextmanager
def keep_graph(replica: Replica) -> Iterator[None]:
    """Keep the graph of a stage, whatever mode the caller is in."""
    with torch.inference_mode(mode=False), torch.enable_grad(), replica.forward_context():
        yield


def start_graph(
    received: Sequence[Sequence[torch.Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Sequence[Sequence[torch.Tensor]], tuple[Any, ...], dict[str, Any]]:
    """Return a stage's inputs as a graph needs them: what may have gradients begins it."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        begun = [[_begin(tensor) for tensor in tensors] for tensors in received]
        return begun, *tree_map(_leave_inference, (args, kwargs))


def _begin(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone().detach()
    # Cloned again, since a stage may write to what it receives.
    return copy.requires_grad_().clone() if copy.is_floating_point() else copy


def _leave_inference(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    return value.clone() if is_tensor and value.is_inference() else value
