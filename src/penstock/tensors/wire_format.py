"""The wire format of a tree: its structure, and the shapes and dtypes of its tensors, as JSON."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from penstock.errors import BoundaryError
from penstock.tensors.tree import Structure, count_tensors

__all__ = ["Format", "TensorFormat", "describe"]

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}

# The structure of gradients, which are sent as a plain list.
_NO_TREE = json.dumps("")
# Larger than any tensor of a real message, and far from what 64 bits can count.
_MOST_ELEMENTS = 2**48


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """The shape and dtype of one tensor, and whether a gradient comes back for it.

    `is_hooked` says that the sender has registered a hook on it, which may come and go.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_hooked: bool = field(default=False, compare=False)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor of this format."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Format:
    """The structure of a tree, as JSON, and the format of its tensors."""

    structure: str
    tensors: tuple[TensorFormat, ...]

    def to_bytes(self) -> bytes:
        """Encode as JSON, for another rank."""
        leaves = [
            [
                list(leaf.shape),
                str(leaf.dtype).removeprefix("torch."),
                leaf.requires_grad,
                leaf.is_hooked,
            ]
            for leaf in self.tensors
        ]
        return json.dumps([self.structure, leaves]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Format":
        """Decode what another rank has sent; raise if it is not a valid format."""
        try:
            structure, leaves = json.loads(data)
            tensors = tuple(_read_leaf(leaf) for leaf in leaves)
            expected = count_tensors(json.loads(structure))
            if expected != len(tensors):
                raise BoundaryError(f"a tree of {expected} tensors came with {len(tensors)}")
            return cls(structure, tensors)
        # JSON that is nested too deeply raises a RecursionError.
        except (ValueError, TypeError, RecursionError) as error:
            raise BoundaryError(
                f"a message from another rank has an invalid header: {error}"
            ) from error

    @property
    def tree_structure(self) -> Structure:
        """The structure as `tree.unflatten` takes it."""
        loaded: Structure = json.loads(self.structure)
        return loaded

    @property
    def hooked(self) -> tuple[int, ...]:
        """The places of the tensors on which the sender has registered hooks."""
        return tuple(place for place, leaf in enumerate(self.tensors) if leaf.is_hooked)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.tensors)

    @property
    def of_gradients(self) -> "Format":
        """The format of the gradients that come back."""
        return Format(_NO_TREE, tuple(leaf for leaf in self.tensors if leaf.requires_grad))


def _read_leaf(leaf: object) -> TensorFormat:
    match leaf:
        case [[*shape], str(name), bool(requires_grad), bool(is_hooked)] if name in _DTYPES:
            dtype = _DTYPES[name]
            may_require_grad = dtype.is_floating_point or dtype.is_complex
            is_possible = requires_grad <= may_require_grad and is_hooked <= requires_grad
            if _is_shape(shape) and is_possible:
                return TensorFormat(tuple(shape), dtype, requires_grad, is_hooked)
    raise BoundaryError(f"not a valid tensor format: {leaf!r}")


def _is_shape(sizes: list[object]) -> TypeGuard[list[int]]:
    numbers = [size for size in sizes if type(size) is int and 0 <= size <= _MOST_ELEMENTS]
    return len(numbers) == len(sizes) and math.prod(numbers) <= _MOST_ELEMENTS


def describe(
    structure: Structure, tensors: Sequence[torch.Tensor], hooked: Collection[int] = ()
) -> Format:
    """Return the format of a tree that `tree.flatten` took apart, with hooks on some tensors."""
    leaves = tuple(
        TensorFormat(tuple(t.shape), t.dtype, t.requires_grad, place in hooked)
        for place, t in enumerate(tensors)
    )
    return Format(json.dumps(structure), leaves)
