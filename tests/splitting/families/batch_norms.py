"""Lets torch's batch norms compute right gradients on a CPU, whatever the layout of what they get.

Where an input and the gradient of its output lie in memory in different orders, and some size is
one, as the number of pictures, torch reads one of them in the order of the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

__all__ = ["batch_norms_in_one_layout"]


@contextmanager
def batch_norms_in_one_layout() -> Iterator[None]:
    """Give all batch norms inputs, and gradients of outputs, that are contiguous."""
    own: Any = functional.batch_norm

    def batch_norm(given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _contiguous(own(_contiguous(given), *args, **kwargs))

    vars(functional)["batch_norm"] = batch_norm
    try:
        yield
    finally:
        vars(functional)["batch_norm"] = own


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it lies in memory without permutations, and so with its gradient.

    `contiguous` leaves the strides of sizes of one unchanged, by which torch takes the order.
    """
    return tensor.reshape(-1).view(tensor.shape)
