"""Turning points that nobody marks: where collectives that torch knows are under way.

    DTensor, functional collectives    begin ... wait_tensor      turns before the wait
    torch.distributed                  begin, work.wait()         turns right after the begin

A mode that sees every operation finds them, in backwards too. It costs a few microseconds per
operation, so that it is on only in the first run of an action, and in those that it has found
collectives in.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from penstock.step.overlap.turning import turning_point
from penstock.torch_private import (
    AsyncCollectiveTensor,
    OpOverload,
    TorchDispatchMode,
    pop_dispatch_mode,
    push_dispatch_mode,
)

__all__ = ["CollectiveTurns"]

# Collectives of `torch.distributed` in which a stage exchanges or adds up what it computes.
_BEGUN = frozenset(
    {
        "_allgather_base_",
        "_reduce_scatter_base_",
        "allgather_",
        "allgather_into_tensor_coalesced_",
        "allreduce_",
        "allreduce_coalesced_",
        "alltoall_",
        "alltoall_base_",
        "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_",
    }
)


def _begins_collective(func: Any) -> bool:
    is_distributed = isinstance(func, OpOverload) and func.namespace == "c10d"
    return is_distributed and func.overloadpacket.__name__ in _BEGUN


class CollectiveTurns(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Turns wherever a collective is under way, and counts how often."""

    # They run as they would without the mode, which does not look into them.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self.found = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let the compiler ignore the mode; compiled code shows its collectives by itself."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Be off while code is compiled."""
        return True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Find what is run inside, in this thread.

        The mode is pushed and not entered: what torch keeps about entered modes is one for all
        threads, and members do not end in the order in which they began.
        """
        push_dispatch_mode(self)
        try:
            yield
        finally:
            pop_dispatch_mode()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and turn where it waits for a collective or has begun one."""
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            # They show what they are made of, and come back here.
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._turn()
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if _begins_collective(func):
            self._turn()
        return result

    def _turn(self) -> None:
        self.found += 1
        turning_point()
