"""How stages on different ranks tell each other what they will send.

A step is announced from stage to stage, before the first microbatch: its key stands for all that
decides what a stage sends.

    stage 0                      stage 1                          stage 2
    key of its arguments  ---->  key of that and of its own ...  ---->
                    was sent under this key before: nothing more is told, receives are posted ahead
                    new: a header goes before each microbatch, and both ends remember it

So the first step, and every step with other shapes, learns its shapes from the tensors themselves.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from penstock.dropin._headers import Channel
from penstock.dropin.stages.metadata import PipeliningMetadataError, TensorMeta, _DTensorMeta

__all__ = ["Announcement", "Link", "Metas", "describe_call", "describe_module"]

Metas: TypeAlias = tuple[TensorMeta | None, ...]

# What the tensors of a step look like, by direction (forward or not) and microbatch.
_Forms: TypeAlias = dict[tuple[bool, int], Metas]

# How many kinds of step are remembered; where shapes never come back, the oldest go.
_KEYS = 64


class Announcement(NamedTuple):
    """What is told before a step: its key, how many rows its batch has, and if headers follow."""

    key: bytes
    rows: int | None
    has_headers: bool


def describe_call(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """What decides the shapes that a call gives: tensors without content, and plain values."""
    return f"{[_describe(item) for item in args]}{[(k, _describe(v)) for k, v in kwargs.items()]}"


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list | dict):
        leaves, structure = tree_flatten(value)
        return f"{structure}{[_describe_leaf(leaf) for leaf in leaves]}"
    return _describe_leaf(value)


def _describe_leaf(leaf: object) -> str:
    match leaf:
        case DTensor():
            return f"{leaf.shape}{leaf.dtype}{leaf.requires_grad}{leaf.placements}"
        case torch.Tensor():
            return f"{leaf.shape}{leaf.dtype}{leaf.requires_grad}"
        case None | bool() | int() | float() | str():
            return repr(leaf)
        case _:
            return type(leaf).__name__


def describe_module(module: nn.Module) -> str:
    """What decides which of its outputs ask for gradients."""
    trained = bytes(parameter.requires_grad for parameter in module.parameters())
    return f"{module.training}{trained!r}"


class Link:
    """One end of the way between two stages on different ranks."""

    def __init__(self, name: str, channel: Channel) -> None:
        self._name = name
        self._channel = channel
        self._known: dict[bytes, _Forms] = {}
        self._open(b"", None)

    def _open(self, key: bytes, forms: _Forms | None) -> None:
        self._key = key
        self._forms = forms
        self._learned: _Forms = {}

    @property
    def is_known(self) -> bool:
        """Whether both ends know what this step will send."""
        return self._forms is not None

    def announce(self, key: bytes, rows: int | None) -> None:
        """Tell the other end which step comes; this does not wait."""
        self._open(key, self._known.get(key))
        self._channel.send(Announcement(key, rows, has_headers=self._forms is None))

    def hear(self) -> Announcement:
        """Wait for the other end to tell which step comes."""
        announcement: Announcement = self._channel.receive()
        forms = None if announcement.has_headers else self._known.get(announcement.key)
        if forms is None and not announcement.has_headers:
            raise PipeliningMetadataError(
                f"{self._name}: the other end counts on shapes that a failed step has lost here; "
                "build the schedule again on all ranks"
            )
        self._open(announcement.key, forms)
        return announcement

    def tell(self, is_forward: bool, microbatch: int, metas: Metas) -> None:
        """Before sending a microbatch: say what comes, or make sure that it is as it was."""
        if self._forms is None:
            self._channel.send((microbatch, metas))
            self._learned[is_forward, microbatch] = metas
        else:
            self._compare(microbatch, self._forms[is_forward, microbatch], metas)

    def _compare(self, microbatch: int, known: Metas, metas: Metas) -> None:
        found = [text for pair in zip(known, metas, strict=False) for text in _differ(*pair)]
        if len(known) != len(metas):
            found = [f"{len(metas)} tensors instead of {len(known)}"]
        if found:
            del self._known[self._key]
            raise PipeliningMetadataError(
                f"{self._name}, microbatch {microbatch}: {'; '.join(found)}, though the arguments "
                "of this step are like those of one before; what a stage sends may depend on the "
                "arguments' shapes, but not on their content"
            )

    def learn(self, is_forward: bool, microbatch: int) -> Metas:
        """What a microbatch will bring; in a step of a new kind this waits for its header."""
        if self._forms is not None:
            return self._forms[is_forward, microbatch]
        while (is_forward, microbatch) not in self._learned:
            number, metas = self._channel.receive()
            self._learned[is_forward, number] = metas
        return self._learned[is_forward, microbatch]

    def remember(self, microbatches: int) -> None:
        """After a step: if it was complete, its key needs no headers from now on."""
        if sum(is_forward for is_forward, _ in self._learned) == microbatches:
            if len(self._known) == _KEYS:
                del self._known[next(iter(self._known))]
            self._known[self._key] = self._learned
            self._open(self._key, self._learned)


def _differ(known: TensorMeta | None, meta: TensorMeta | None) -> Sequence[str]:
    """Where a tensor is not what its receiver counts on; how it lies in memory does not matter."""
    if known is None or meta is None:
        return [] if meta is known else [f"{meta} instead of {known}"]
    names = ["shape", "dtype"]
    if isinstance(known, _DTensorMeta) and isinstance(meta, _DTensorMeta):
        names += ["global_shape", "placements", "mesh_dim_names"]
    found = [
        f"{name} mismatch: {getattr(meta, name)} instead of {getattr(known, name)}"
        for name in names
        if getattr(meta, name) != getattr(known, name)
    ]
    if meta.requires_grad and not known.requires_grad:
        found.append("a gradient is asked for that was not asked for before")
    return found
