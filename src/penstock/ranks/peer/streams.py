"""Streams that nobody else uses.

torch hands out the same few streams again and again. A stream that waits for another rank would
then hold up whatever else was put into it. These streams are kept for the next channel when one is
closed, and never destroyed: torch's allocator may still note in them that memory is free.
"""

import torch

from penstock.ranks.peer.driver import create_stream, is_stream_idle

__all__ = ["give_back_stream", "take_stream"]


def take_stream(device: torch.device) -> torch.cuda.ExternalStream:
    """Return a stream of this device, which is current, until it is given back."""
    unused = _UNUSED.setdefault(device, [])
    handle = unused.pop() if unused else create_stream()
    return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]  # untyped upstream


def give_back_stream(stream: torch.cuda.Stream) -> None:
    """Let a later channel have a stream, unless something still waits in it."""
    handle: int = stream.cuda_stream
    if is_stream_idle(handle):
        _UNUSED.setdefault(stream.device, []).append(handle)


_UNUSED: dict[torch.device, list[int]] = {}
