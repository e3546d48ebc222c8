"""The file of one process as an image in host memory, which is kept from save to save.

head numbers tail   head numbers tail   ...        one archive per part

Heads and tails are written once. A save copies numbers to their places, and the whole is written
with one call. The memory is pinned if numbers come from a GPU, so that copies run at full speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.checkpoint.host_memory import host_memory
from penstock.checkpoint.manifest import find_dtype
from penstock.checkpoint.parts import Part, local_part
from penstock.checkpoint.saving.archives import Archive, archive_of
from penstock.torch_private import foreach_copy_

__all__ = ["Image", "Place"]

# Numbers begin at a multiple of this, as in the files of torch.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part is in the file: its archive, and the numbers in it."""

    start: int
    length: int
    position: int


class Image:
    """A file in memory, for these parts; `places` has where each of them is."""

    def __init__(self, parts: Sequence[Part], *, is_pinned: bool) -> None:
        self.parts = tuple(parts)
        self.is_pinned = is_pinned
        archives = [archive_of(find_dtype(part.dtype), part.box.sizes) for part in parts]
        self.places = _lay_out(parts, archives)
        size = max((place.start + place.length for place in self.places), default=0)
        if is_pinned:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = host_memory([size], torch.uint8)
        self._slots: list[torch.Tensor] = []
        bytes_of = self.view()
        end = 0
        for part, archive, place in zip(parts, archives, self.places, strict=True):
            bytes_of[end : place.start] = bytes(place.start - end)
            end = place.start + place.length
            bytes_of[place.start : place.position] = archive.head
            bytes_of[end - len(archive.tail) : end] = archive.tail
            dtype = find_dtype(part.dtype)
            numbers = self._memory[place.position : end - len(archive.tail)]
            if part.box.count:
                self._slots.append(numbers.view(dtype).view(part.box.sizes))

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the numbers of tensors, by key, to their places; done on return."""
        held = [local_part(tensors[part.key]) for part in self.parts if part.box.count]
        sources = [numbers.resolve_conj().resolve_neg() for numbers in held]
        if not sources:
            return
        foreach_copy_(self._slots, sources, self.is_pinned)
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.synchronize(device)

    def view(self) -> memoryview:
        """Return the bytes of the file."""
        return memoryview(self._memory.numpy().data)

    @property
    def num_bytes(self) -> int:
        """The length of the file."""
        return self._memory.numel()


def _lay_out(parts: Sequence[Part], archives: Sequence[Archive]) -> tuple[Place, ...]:
    places, end = [], 0
    for part, archive in zip(parts, archives, strict=True):
        size = part.box.count * find_dtype(part.dtype).itemsize
        position = -(-(end + len(archive.head)) // _ALIGNMENT) * _ALIGNMENT
        start = position - len(archive.head)
        end = position + size + len(archive.tail)
        places.append(Place(start, end - start, position))
    return tuple(places)
