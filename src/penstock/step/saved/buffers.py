"""The buffers that a module's forwards change, so that one can run again as if for the first time.

The first forward copies all buffers and compares them afterwards; later ones copy only those that
are known to change. Another one that changes later is noticed by versions and identities, and
refused, because nobody knows what its forward began with.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from penstock.errors import PipelineError

__all__ = ["BufferValues", "ChangingBuffers"]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A buffer, by the module that has it and its name there: a tensor may replace another one."""

    owner: nn.Module
    name: str

    @property
    def buffer(self) -> torch.Tensor | None:
        return self.owner._buffers[self.name]


@dataclass(frozen=True, slots=True, eq=False)
class _Value:
    """What a buffer was at one time: its tensor, and a copy of its numbers."""

    place: _Place
    tensor: torch.Tensor | None
    copy: torch.Tensor | None


@dataclass(slots=True)
class BufferValues:
    """What the buffers that change were at one time."""

    values: Sequence[_Value]


class ChangingBuffers:
    """The buffers that the forwards of one stage write to, or replace."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._changing: list[_Place] | None = None

    @contextmanager
    def watch(self) -> Iterator[BufferValues]:
        """Find out what changes in the forward that runs meanwhile; yield what was before."""
        places = _places(self._module)
        states = [_state(place) for place in places]
        before = BufferValues(_read(places if self._changing is None else self._changing))
        yield before
        changed = {
            place.owner
            for place, state in zip(places, states, strict=True)
            if _state(place) != state
        }
        if self._changing is None:
            # Batch norm does not count what it writes as a new version.
            changed |= {value.place.owner for value in before.values if _differs(value)}
            self._changing = [place for place in places if place.owner in changed]
            before.values = [value for value in before.values if value.place.owner in changed]
        elif new := changed - {place.owner for place in self._changing}:
            late = [place for place in places if place.owner in new]
            self._changing += late
            raise PipelineError(
                f"stage {self._stage} must change its buffers from its first microbatch on, or "
                f"never ({', '.join(sorted({place.name for place in late}))}: began later); "
                "repeat the step, which now expects it"
            )

    @contextmanager
    def as_they_were(self, before: BufferValues) -> Iterator[None]:
        """Let the buffers be what they were before a forward, and afterwards what they are now."""
        now = _read([value.place for value in before.values])
        _put_back(before.values)
        try:
            yield
        finally:
            _put_back(now)


def _places(module: nn.Module) -> list[_Place]:
    return [_Place(owner, name) for owner in module.modules() for name in owner._buffers]


def _state(place: _Place) -> tuple[int, int]:
    buffer = place.buffer
    return (0, 0) if buffer is None else (id(buffer), buffer._version)


def _read(places: Sequence[_Place]) -> list[_Value]:
    return [
        _Value(place, buffer, None if buffer is None else buffer.detach().clone())
        for place in places
        for buffer in [place.buffer]
    ]


def _put_back(values: Sequence[_Value]) -> None:
    for value in values:
        if value.tensor is not None and value.copy is not None:
            # Not a new version: the graph of another microbatch may have saved the buffer.
            value.tensor.data.copy_(value.copy)
        value.place.owner._buffers[value.place.name] = value.tensor


def _differs(value: _Value) -> bool:
    buffer, copy = value.place.buffer, value.copy
    if buffer is None or copy is None:
        return buffer is not copy
    return not torch.equal(buffer, copy)
