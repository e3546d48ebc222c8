"""Small messages between two ranks on the host, beside the tensors that they exchange."""

import pickle
from typing import Any

import torch
import torch.distributed as dist

from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.private_groups import open_gloo

__all__ = ["Channel", "Host"]

# Tensors go with tag 0; each channel has a tag of its own from here on.
_FIRST_TAG = 1 << 20


class Host:
    """The members of a group, reached from host memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        has_host_memory = torch.device("cpu") in group._device_types
        self._group = group if has_host_memory else open_gloo(group, Connections())
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, data: torch.Tensor, rank: int, tag: int) -> None:
        """Start to send; the message is kept until `finish`."""
        self._sends.append((self._group.send([data], rank, tag), data))

    def receive(self, data: torch.Tensor, rank: int, tag: int) -> None:
        """Wait for a message."""
        self._group.recv([data], rank, tag).wait()

    def finish(self) -> None:
        """Wait until everything that was sent has been taken."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def forget(self) -> None:
        """Let go of what nobody will take any more, after a step that failed."""
        self._sends.clear()


class Channel:
    """Messages of any length to or from one rank, in the order in which they are sent."""

    def __init__(self, host: Host, rank: int, number: int) -> None:
        self._host = host
        self._rank = rank
        self._tag = _FIRST_TAG + number

    def send(self, content: Any) -> None:
        """Send plain data or descriptions of tensors; this does not wait."""
        data = pickle.dumps(content)
        self._host.send(torch.tensor([len(data)]), self._rank, self._tag)
        self._host.send(
            torch.frombuffer(bytearray(data), dtype=torch.uint8), self._rank, self._tag
        )

    def receive(self) -> Any:
        """Wait for the next message."""
        length = torch.empty(1, dtype=torch.int64)
        self._host.receive(length, self._rank, self._tag)
        data = torch.empty(int(length.item()), dtype=torch.uint8)
        self._host.receive(data, self._rank, self._tag)
        return pickle.loads(bytes(data.tolist()))
