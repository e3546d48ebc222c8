"""Functions of torch by what they do with values, and calls of them outside of the trace."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from penstock.modules.untouched import same_random_numbers, torch_random_states
from penstock.torch_private import DisableTorchFunction, disable_current_modes

__all__ = [
    "COPIES",
    "INDEXING",
    "MAKERS",
    "READS",
    "REPEATS",
    "SHAPED_BY_VALUES",
    "SIZED",
    "compute",
    "is_followed",
    "is_plain",
    "outside_of_trace",
]

_TENSOR = torch.Tensor
# Functions that return a tensor's values as numbers.
READS = frozenset(
    getattr(_TENSOR, name)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
)
# Functions that make tensors of plain numbers.
MAKERS = frozenset(
    getattr(torch, name)
    for name in ("tensor", "as_tensor", "arange", "linspace", "zeros", "ones", "full", "eye")
)
# Those of them that keep the type of the tensors among their numbers.
COPIES = frozenset((torch.tensor, torch.as_tensor))
# Functions whose result has as many elements as the values of an argument say.
SHAPED_BY_VALUES = frozenset(
    getattr(owner, name)
    for owner in (torch, _TENSOR)
    for name in ("nonzero", "argwhere", "unique", "unique_consecutive", "bincount")
)
REPEATS = frozenset((torch.repeat_interleave, _TENSOR.repeat_interleave))
# Functions of a tensor that take sizes, which may be tensors too.
SIZED = frozenset(
    getattr(_TENSOR, name)
    for name in ("view", "reshape", "expand", "repeat", "new_zeros", "new_ones", "new_full")
) | {torch.reshape, torch.nn.functional.interpolate}
INDEXING = _TENSOR.__getitem__
_MODULES = frozenset(
    (None, "torch", "torch._tensor", "torch.functional", "torch.nn.functional", "torch._C._nn")
)
# What functions with such names make has no values yet.
_UNFILLED = ("empty", "resize")
_PLAIN = (
    int,
    float,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def is_followed(func: Callable[..., Any]) -> bool:
    """Return whether what a function computes depends on nothing but its arguments."""
    name = str(getattr(func, "__name__", ""))
    is_unfilled = any(part in name for part in _UNFILLED)
    return getattr(func, "__module__", None) in _MODULES and not is_unfilled


def is_plain(value: Any) -> bool:
    """Return whether an argument is the same in every run."""
    if isinstance(value, slice):
        return all(isinstance(x, int | None) for x in (value.start, value.stop, value.step))
    return isinstance(value, _PLAIN)


@contextmanager
def outside_of_trace() -> Iterator[None]:
    """Compute with real tensors meanwhile, without a trace of it."""
    with disable_current_modes(), DisableTorchFunction(), torch.no_grad():
        yield


def compute(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any] | None:
    """Return what a function returns for real tensors; None if it fails or draws randomly."""
    with outside_of_trace(), same_random_numbers():
        before = torch_random_states()
        try:
            result = func(*args, **kwargs)
        except Exception:  # the trace itself then says what is wrong
            return None
        has_drawn = any(
            not torch.equal(old, new)
            for old, new in zip(before, torch_random_states(), strict=False)
        )
        return None if has_drawn else (result,)
