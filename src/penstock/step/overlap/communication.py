"""Communication inside a stage that another action of an overlapped pair can run beside."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from penstock.errors import ArgumentError
from penstock.step.overlap.turning import turning_point, without_turns

__all__ = ["Begin", "Waitable", "communicate"]


class Waitable(Protocol):
    """Communication that is under way, as `torch.distributed` returns it."""

    def wait(self) -> Any:
        """Wait for it; on a device, let the stream wait."""


# Begins communication of a tensor: the tensor that will have the result, and what to wait for.
Begin: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, Waitable | None]]


class _Communication(torch.autograd.Function):
    """A collective with a turning point, whose backward is a collective of the same kind."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, begin: Begin, reverse: Begin) -> torch.Tensor:
        ctx.begin, ctx.reverse = begin, reverse
        with without_turns():
            result, work = begin(value)
        if result is value:
            raise ArgumentError(
                "communication must return its result in a new tensor (got the one that it was "
                "given); write to a copy"
            )
        turning_point()
        if work is not None:
            with without_turns():
                work.wait()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return communicate(gradient, ctx.reverse, ctx.begin), None, None


def communicate(value: torch.Tensor, begin: Begin, reverse: Begin) -> torch.Tensor:
    """Run a collective on a tensor, and meanwhile the other action of an overlapped pair.

    `begin(value)` begins it asynchronously, and returns the tensor that will have the result and
    the work to wait for. `reverse(gradient)` does the same for the gradient, in the backward.

    >>> def double(value):
    ...     return value * 2, None  # what needs no wait returns no work
    >>> x = torch.ones(2, requires_grad=True)
    >>> communicate(x, double, double).sum().backward()
    >>> x.grad
    tensor([2., 2.])
    """
    result: torch.Tensor = _Communication.apply(value, begin, reverse)  # type: ignore[no-untyped-call]  # untyped upstream
    return result


# Compiled code calls it, and does not look into it; see `turning_point`.
communicate._torchdynamo_disable = True  # type: ignore[attr-defined]  # functions take any name
