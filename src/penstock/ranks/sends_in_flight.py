"""Sends that are on their way, and the tensors that must live until they are done."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from penstock.ranks.faults import LinkLostError
from penstock.ranks.private_groups import StartedWork

__all__ = ["SendsInFlight", "wait_for"]

_Send: TypeAlias = tuple[Sequence[StartedWork], list[torch.Tensor]]


class SendsInFlight:
    """The sends of a step, by the rank that they go to; at most `limit` of each are in flight."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._sends: dict[int, deque[_Send]] = {}

    def hold(self, rank: int, works: Sequence[StartedWork], buffers: list[torch.Tensor]) -> None:
        """Keep a send alive until it is done; wait for the oldest one if there are too many."""
        sends = self._sends.setdefault(rank, deque())
        sends.append((works, buffers))
        while len(sends) > self._limit:
            wait_for(sends.popleft()[0])

    def wait_for_all(self) -> None:
        """Wait for all sends."""
        for sends in self._sends.values():
            while sends:
                wait_for(sends.popleft()[0])


def wait_for(works: Iterable[StartedWork]) -> None:
    """Wait for communication; an error of torch means that the link is lost."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise LinkLostError(str(error)) from error
