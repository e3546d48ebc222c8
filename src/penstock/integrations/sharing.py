"""One process's value on all processes of a group, as JSON and tensors.

    source      make, encode     header ->          -> agreed?    tensors ->    value
    others                   -> header   decode     -> agreed? -> tensors       value

An error on any process, in making, encoding or decoding the value, is the same error on all of
them, before any tensor travels.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import BoundaryError, PipelineError
from penstock.integrations.encoding import decode, encode
from penstock.ranks.control import describe_error
from penstock.tensors.tree import flatten, unflatten
from penstock.tensors.wire_format import Format, describe

__all__ = ["share"]

# The longest header: what a value consists of besides its tensors.
_MOST_BYTES = 2**28


def share(
    make: Callable[[], Any],
    what: str,
    *,
    group: dist.ProcessGroup | None = None,
    source: int = 0,
    device: torch.device | None = None,
) -> Any:
    """Return on every process what `make` returns on one, which alone calls it.

    `source` is its number in the group, and `what` is what errors call the value. Tensors come
    without their graphs; on a `device` if given, else on the kind of device that they are on.
    """
    wire = _Wire(group, source)
    header, own, failure = b"", list[torch.Tensor](), None
    if wire.is_source:
        try:
            structure, own = flatten(encode(make(), what))
            kinds = [tensor.device.type for tensor in own]
            header = json.dumps([kinds, describe(structure, own).to_bytes().decode()]).encode()
            if len(header) > _MOST_BYTES:
                raise BoundaryError(
                    f"{what} must be plain data of at most {_MOST_BYTES:,} bytes besides its "
                    f"tensors (got {len(header):,})"
                )
        except Exception as error:
            header, failure = b"", error
    header = wire.send_bytes(header, source)
    value, tensors = None, list[torch.Tensor]()
    if header:
        try:
            value, tensors = _prepare(header, device)
        except Exception as error:
            failure = error
    wire.agree(what, failure)
    assert header, "a source without a header has failed"
    for number, tensor in enumerate(tensors):
        wire.send_tensor(own[number] if own else None, tensor)
    return value


def _prepare(header: bytes, device: torch.device | None) -> tuple[Any, list[torch.Tensor]]:
    """Return the value with tensors that are not filled yet, and those tensors."""
    kinds, text = json.loads(header)
    expected = Format.from_bytes(text.encode())
    places = [torch.device(kind) if device is None else device for kind in kinds]
    tensors = [form.empty(place) for form, place in zip(expected.tensors, places, strict=True)]
    return decode(unflatten(expected.tree_structure, tensors)), tensors


class _Wire:
    """The group, and the kind of device whose memory it sends."""

    def __init__(self, group: dist.ProcessGroup | None, source: int) -> None:
        self._group, self._source = group, source
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    @property
    def is_source(self) -> bool:
        """Whether this process has the value."""
        return self._rank == self._source

    def send_bytes(self, data: bytes, source: int) -> bytes:
        """Return the bytes of one process on all of them."""
        length = torch.tensor([len(data)], device=self._device)
        dist.broadcast(length, group=self._group, group_src=source)
        size = int(length)
        if not 0 < size <= _MOST_BYTES:
            return b""
        if self._rank == source:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        else:
            content = torch.empty(size, dtype=torch.uint8, device=self._device)
        dist.broadcast(content, group=self._group, group_src=source)
        return content.cpu().numpy().tobytes()

    def agree(self, what: str, failure: Exception | None) -> None:
        """Raise the same error on all processes if one of them has failed."""
        failed = torch.tensor([self._size if failure is None else self._rank], device=self._device)
        dist.all_reduce(failed, dist.ReduceOp.MIN, group=self._group)
        first = int(failed)
        if first == self._size:
            return
        own = "" if failure is None else describe_error(failure)
        text = self.send_bytes(own.encode(), first).decode()
        error = PipelineError(f"process {first} cannot share {what}: {text}")
        raise error from failure

    def send_tensor(self, own: torch.Tensor | None, place: torch.Tensor) -> None:
        """Fill a tensor with that of the source; as bytes, since not every dtype can be sent."""
        if not place.numel():
            return
        given = place if own is None else own
        moved = given.to(self._device).contiguous()
        dist.broadcast(moved.view(-1).view(torch.uint8), group=self._group, group_src=self._source)
        if moved is not place:
            place.copy_(moved)
