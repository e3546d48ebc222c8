"""What the graph of a microbatch holds, and packing it: each piece of memory once.

Saved tensors are packed where they are, after the forward. So a forward whose result stays on the
device costs nothing more, and whoever else holds one of these tensors keeps it. Parameters and
buffers stay, and so does what has hooks already, such as an activation checkpoint.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch.autograd.graph import Node, saved_tensors_hooks

from penstock.deferred.linear import held_by, hold

__all__ = ["PackedGraph", "SavedPiece", "pack_graph"]

_PREFIX = "_raw_saved_"


@dataclass(slots=True, eq=False)
class SavedPiece:
    """One piece of memory that a graph holds; None while it is on the host."""

    storage: torch.UntypedStorage | None
    size: int

    @property
    def bytes(self) -> torch.Tensor:
        """The memory as a tensor of bytes."""
        assert self.storage is not None, "it is on the device"
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """A tensor in a piece of memory, without the memory."""

    piece: SavedPiece
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def make(self) -> torch.Tensor:
        """Return the tensor."""
        storage = self.piece.storage
        assert storage is not None, "reloaded before it is used"
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class _Pieces:
    """Pieces of memory by address.

    The graph holds this by its hooks, so it must not hold the graph.
    """

    def __init__(self) -> None:
        self.found: dict[int, SavedPiece] = {}

    def view(self, tensor: torch.Tensor) -> _View:
        """Return a tensor without its memory, which becomes a piece of the graph."""
        storage = tensor.untyped_storage()
        piece = self.found.setdefault(storage.data_ptr(), SavedPiece(storage, storage.nbytes()))
        offset = int(tensor.storage_offset())
        return _View(piece, tensor.dtype, offset, tensor.shape, tensor.stride())


@dataclass(slots=True, eq=False)
class PackedGraph:
    """The pieces of memory that a graph holds, and what is to be done when they leave or return.

    `leaves` are the inputs of the graph, which autograd itself holds. `calls` are nodes that
    defer weight gradients, and hold tensors in their own way.
    """

    pieces: _Pieces = field(default_factory=_Pieces)
    leaves: list[tuple[torch.Tensor, _View]] = field(default_factory=list)
    calls: list[tuple[Node, Callable[[], torch.Tensor], _View]] = field(default_factory=list)

    @property
    def bytes(self) -> list[torch.Tensor]:
        """The memory of every piece."""
        return [piece.bytes for piece in self.pieces.found.values()]

    def leave(self) -> None:
        """Let go of the memory on the device."""
        for leaf, _ in self.leaves:
            leaf.data = leaf.new_empty(0)
        for node, _, _ in self.calls:
            hold(node, None, None)
        for piece in self.pieces.found.values():
            piece.storage = None

    def come_back(self, memories: Sequence[torch.Tensor]) -> None:
        """Hold these bytes again, one tensor for each piece; the backward frees each by itself."""
        for piece, memory in zip(self.pieces.found.values(), memories, strict=True):
            piece.storage = memory.untyped_storage()
        for leaf, view in self.leaves:
            leaf.data = view.make()
        for node, value, kept in self.calls:
            hold(node, value(), kept.make())
        self.pieces.found.clear()
        self.leaves.clear()
        self.calls.clear()


def pack_graph(
    roots: Iterable[Node], inputs: Iterable[torch.Tensor], stays: Collection[int]
) -> PackedGraph:
    """Pack what is reachable from the roots; memory at the addresses in `stays` is left alone."""
    packed = PackedGraph()
    pieces = packed.pieces

    def moves(tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor) or type(tensor) is not torch.Tensor:
            return False
        # Who conjugates or negates a value when it is read is not in its memory.
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        # A number of the model's code looks like this too, and torch cannot pack it under a mode.
        is_number = tensor.dim() == 0 and storage.nbytes() == tensor.nbytes
        return tensor.nbytes > 0 and not is_number and storage.data_ptr() not in stays

    for node in _reachable(roots):
        for saved in _saved_by(node):
            if saved.unpack_hook is None and moves(saved.data):
                saved.register_hooks(pieces.view, _View.make)
        held = held_by(node)
        if held is not None and moves(held[0]) and moves(held[1]):
            packed.calls.append((node, _pack_value(pieces, held[0]), pieces.view(held[1])))
    for leaf in inputs:
        if moves(leaf):
            packed.leaves.append((leaf, pieces.view(leaf)))
    return packed


class _Hold(torch.autograd.Function):
    """A node that does nothing but save a tensor with its place in the graph."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value.new_empty(0)


def _pack_value(pieces: _Pieces, value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what makes a tensor again, in the same place of the graph."""
    if not value.requires_grad:
        return pieces.view(value).make
    # A module may have switched gradients off.
    with torch.enable_grad(), saved_tensors_hooks(pieces.view, _View.make):
        # Up to torch 2.11 at least, a node of a Python function frees what it has saved when its
        # last output goes, even if someone holds the node. So we hold the output.
        output: Any = _Hold.apply(value)  # type: ignore[no-untyped-call]  # untyped upstream

    def unpack() -> torch.Tensor:
        (again,) = output.grad_fn.saved_tensors
        return cast("torch.Tensor", again)

    return unpack


def _reachable(roots: Iterable[Node]) -> Iterator[Node]:
    waiting, seen = list(roots), set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [after for after, _ in node.next_functions if after is not None]


def _saved_by(node: Node) -> Iterator[Any]:
    """Yield what a node has saved, packed or not; what is missing or freed is left out."""
    for name in _names(type(node)):
        try:
            saved = getattr(node, name)
        except RuntimeError:
            continue
        for item in saved if isinstance(saved, tuple | list) else (saved,):
            if _is_there(item):
                yield item


def _is_there(saved: Any) -> bool:
    """Return whether this is a saved tensor that is neither missing nor freed."""
    try:
        return saved.unpack_hook is not None or saved.data is not None
    except (AttributeError, RuntimeError):
        return False


@cache
def _names(node: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(node) if name.startswith(_PREFIX))
