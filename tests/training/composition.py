"""What tests of data parallelism share: own stages, whole gradients, and a log of collectives."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import penstock as ps
from tests.models import gradients_of, mean_loss

__all__ = ["CollectiveLog", "SendLog", "own_stages", "reference_gradients", "whole_gradients"]

_LOGGED = {
    "c10d::_allgather_base_": "gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::broadcast_": "broadcast",
}


class CollectiveLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Notes which collectives run inside which action."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self.seen: list[tuple[str, str]] = []
        self._action = "outside"

    def watch(self, action: ps.Action, run: Callable[[], None]) -> None:
        """Wrap an action."""
        self._action = str(action)
        with self:
            run()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        name = func._overloadpacket._qualified_op_name
        if name in _LOGGED:
            self.seen.append((self._action, _LOGGED[name]))
        return func(*args, **(kwargs or {}))


class SendLog:
    """Notes in which actions tensors are sent to another rank."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._action = "outside"

    def watch(self, action: ps.Action, run: Callable[[], None]) -> None:
        """Wrap an action."""
        self._action = str(action)
        run()
        self._action = "outside"

    def listen(self, pipeline: ps.Pipeline) -> None:
        """Note what goes through the group that the pipeline talks by."""
        channels: Any = pipeline._running().transport._channels  # type: ignore[attr-defined]  # on purpose
        channels._gloo = _Heard(channels._gloo, lambda: self.seen.append(self._action))


class _Heard:
    """A group that also reports every send."""

    def __init__(self, group: Any, tell: Callable[[], None]) -> None:
        self._group, self._tell = group, tell

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self._tell()
        return self._group.send(tensors, peer, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def own_stages(
    stages: Sequence[nn.Module], schedule: ps.Schedule, rank: int
) -> dict[int, nn.Module]:
    """Copies of the stages that a rank holds."""
    return {stage: deepcopy(stages[stage]) for stage in schedule.placement.stages(rank)}


def reference_gradients(
    stages: Sequence[nn.Module], batch: torch.Tensor, target: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the gradients of the unsplit model, named as a pipeline names them."""
    model = deepcopy(nn.Sequential(*stages))
    torch.autograd.backward(mean_loss(model(batch), target))
    return gradients_of(model.named_parameters())


def whole_gradients(
    parameters: Iterable[tuple[str, nn.Parameter]],
) -> dict[str, torch.Tensor]:
    """Return the gradients by name, each put together from its shards."""
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for name, p in parameters
        if p.grad is not None
    }
