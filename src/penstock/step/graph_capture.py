"""Capture of CUDA graphs: what a module must not do, and the state of torch around it.

A graph repeats kernels on the memory that they had. It calls no Python, and takes in no values
from the host, so that a module which needs either is refused before its numbers could go wrong.
"""

import gc
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple

import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.modules.untouched import untouched
from penstock.torch_private import end_allocate_to_pool, release_pool

__all__ = [
    "CapturePlace",
    "GraphCapture",
    "NotCapturableError",
    "leaving_no_trace",
    "nothing_cast_before",
    "own_failures",
    "places_of",
    "require_capturable",
    "require_device",
]

# Only this thread's mistakes end a capture: a communication library may have threads of its own.
_MODE = "thread_local"


class CapturePlace(NamedTuple):
    """The address, layout and training state of a weight or buffer."""

    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    has_hooks: bool


class NotCapturableError(PenstockError, RuntimeError):
    """The reason why a stage cannot run as CUDA graphs."""


def places_of(module: nn.Module) -> tuple[CapturePlace, ...]:
    """Return the places of everything that a graph finds by address."""
    return tuple(
        CapturePlace(t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad, _has_hooks(t))
        for tensors in (module.parameters(), module.buffers())
        for t in tensors
    )


def _has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def require_device(tensors: Iterable[torch.Tensor], what: str) -> None:
    """Reject values in host memory, because a graph would repeat those of its capture."""
    for tensor in tensors:
        if not tensor.is_cuda:
            raise NotCapturableError(f"it {what} a tensor on {tensor.device}")


def require_capturable(module: nn.Module) -> None:
    """Reject a module whose state a graph would not see, or whose hooks it would not call."""
    require_device(module.parameters(), "has")
    require_device(module.buffers(), "has")
    for name, parameter in module.named_parameters():
        if _has_hooks(parameter):
            raise NotCapturableError(f"{name} has hooks, which a graph does not call")


@contextmanager
def nothing_cast_before() -> Iterator[None]:
    """Let autocast cast weights again inside, and drop those casts afterwards.

    It keeps what it has cast to the end of the step. A graph that used that would use it for good,
    long after the weight has changed and the memory has another owner.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def own_failures() -> Iterator[None]:
    """Turn errors of a capture into `NotCapturableError`; the stage then runs without graphs."""
    try:
        yield
    except NotCapturableError:
        raise
    except (RuntimeError, Warning) as error:
        raise NotCapturableError(str(error).split("\n")[0]) from error


@contextmanager
def leaving_no_trace(module: nn.Module) -> Iterator[None]:
    """Restore the module and the generators once the device is done with what runs inside."""
    with untouched([module]):
        try:
            yield
        finally:
            torch.cuda.synchronize()


class GraphCapture:
    """A series of captures of graphs that run in sequence, on one stream and memory pool."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def graph(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture what runs inside."""
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=_MODE)
        try:
            with _same_stream_after(), _no_garbage_collected(), _may_be_empty(), capture:
                yield graph
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """Bring torch out of a failed capture, in which its allocator and generator still are.

        The generator comes out with the next capture that succeeds.
        """
        device = torch.cuda.current_device()
        with suppress(RuntimeError):
            end_allocate_to_pool(device, self._pool)
            release_pool(device, self._pool)
        number = torch.empty((), device=torch.device("cuda", device))
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=_MODE):
            number.zero_()


def _same_stream_after() -> AbstractContextManager[None]:
    """Restore the current stream, because a failed capture leaves its own one current."""
    return torch.cuda.stream(torch.cuda.current_stream())


@contextmanager
def _may_be_empty() -> Iterator[None]:
    """Ignore torch's warning about empty graphs: a stage may have no work in I or W."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Switch garbage collection off, because freeing another graph would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
