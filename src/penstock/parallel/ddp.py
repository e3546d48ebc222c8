"""Stages replicated by DDP: gradients are averaged once per step, one message per dtype."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.torch_private import ReplicatedModule, foreach_div_, replicate

__all__ = ["ReplicatedStage", "find_copies"]

# A module that `DistributedDataParallel` wraps, or that the composable `replicate` has marked.
Copy: TypeAlias = DistributedDataParallel | ReplicatedModule


def find_copies(module: nn.Module) -> list[Copy]:
    """Return the parts of a stage that DDP replicates on all ranks of its group."""
    return [
        child
        for child in module.modules()
        if isinstance(child, DistributedDataParallel | ReplicatedModule)
    ]


class ReplicatedStage:
    """A stage with DDP, whose own reduction is off; ours runs when the gradients are complete.

    Only what this step adds is averaged: what `.grad` held before is set aside meanwhile. Hooks
    that DDP runs on its buckets (`register_comm_hook`) are not used.
    """

    is_alone = False

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        for copy in copies:
            if isinstance(copy, ReplicatedModule):
                copy.set_requires_gradient_sync(False)

    def begin_step(self) -> None:
        """Set aside the gradients of earlier steps."""
        for parameter in (p for copy in self._copies for p in _trained(copy)):
            if parameter.grad is not None:
                self._before[parameter] = parameter.grad
                parameter.grad = None

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Keep DDP from reducing in the backward of this forward."""
        with ExitStack() as stack:
            for copy in self._copies:
                if isinstance(copy, DistributedDataParallel):
                    stack.enter_context(copy.no_sync())
            yield

    def unshard(self) -> None:
        """Do nothing: every rank holds all parameters."""

    def reshard(self) -> None:
        """Do nothing: every rank holds all parameters."""

    def reduce_gradients(self) -> None:
        """Average this step's gradients, and add those of earlier steps."""
        for copy in self._copies:
            wrapper = _wrapper(copy)
            trained = _trained(copy)
            for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
                same = [parameter for parameter in trained if parameter.dtype == dtype]
                _average(same, wrapper.process_group)
            # As after a backward that DDP reduced itself: the next forward shares the buffers.
            wrapper.require_forward_param_sync = True
        for parameter, before in self._before.items():
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._before.clear()

    def abandon_step(self) -> None:
        """Restore the gradients of earlier steps."""
        for parameter, before in self._before.items():
            parameter.grad = before
        self._before.clear()


def _wrapper(copy: Copy) -> DistributedDataParallel:
    """Return the DDP wrapper; `replicate` makes one when its module first runs."""
    if isinstance(copy, DistributedDataParallel):
        return copy
    return replicate.state(cast(nn.Module, copy))._ddp


def _trained(copy: Copy) -> list[nn.Parameter]:
    """Return the parameters that DDP keeps equal, in the same order on all ranks."""
    module = cast(nn.Module, copy)
    ignored: set[str] = set()
    if isinstance(copy, DistributedDataParallel):
        module, ignored = copy.module, copy.parameters_to_ignore
    return [
        parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def _average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of parameters of one dtype, in one message.

    A parameter that only some ranks have used counts as zero on the others. The message also
    carries how many ranks have used each, so that an unused parameter gets no gradient.
    """
    used = [parameter.grad is not None for parameter in parameters]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    counts = parts[0].new_ones(len(used))
    if not all(used):
        counts.copy_(torch.tensor(used, dtype=counts.dtype, device="cpu"), non_blocking=True)
    flat = torch.cat([*(part.detach().reshape(-1) for part in parts), counts])
    dist.all_reduce(flat, group=group)
    *averages, counts = torch.split(flat, [*(part.numel() for part in parts), len(used)])
    foreach_div_(averages, dist.get_world_size(group))
    anywhere = used if all(used) else (counts > 0).tolist()
    for parameter, average, is_used in zip(parameters, averages, anywhere, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(average.view_as(parameter))
        elif is_used:
            parameter.grad = average.view_as(parameter).clone()
