"""How the waits of a device end when a rank is gone.

Messages of that rank will not come. Before the streams that wait for them continue, its rings are
filled with NaN, which goes the way of every number that is computed from them. Messages between
the others are left alone: they still come, with NaN in them. Only if one of the others has stopped
sending or receiving as well, because its step was aborted, are the waits for it ended too, first
those for messages and later those for room, which would let messages overwrite each other.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic, sleep

import torch

from penstock.ranks.peer.channel import PeerReceiver, PeerSender
from penstock.ranks.peer.driver import DriverError, is_stream_idle, use_context
from penstock.ranks.peer.opening import PeerChannels

__all__ = ["abort", "mark_queued", "wait_until"]

# How long messages and room between the remaining ranks are waited for.
_MESSAGE_SECONDS = 3.0
_ROOM_SECONDS = 6.0
# How long rings are given to be filled with NaN.
_SPOIL_SECONDS = 0.5
_LOOK_SECONDS = 0.005


def abort(channels: PeerChannels, lost: int | None) -> None:
    """End the waits for a rank, or for all if it is not known which one; from any thread."""
    if channels.is_aborted or not channels.ends:
        return
    channels.is_aborted, channels.lost = True, lost
    for end in channels.ends:
        end.abort()
    with suppress(DriverError):
        use_context(channels.context)
    rescue = _Rescue(channels)
    rescue.release()
    # Devices of the others may still write counters, and so let waits begin again.
    Thread(target=rescue.keep_releasing, name="penstock-release", daemon=True).start()


class _Rescue:
    """The ends of channels whose waits are ended by now."""

    def __init__(self, channels: PeerChannels) -> None:
        self._channels = channels
        self._began = monotonic()
        self._spoiled: set[PeerReceiver] = set()

    def keep_releasing(self) -> None:
        with suppress(DriverError):
            use_context(self._channels.context)
        is_done = mark_queued(self._channels)
        while not is_done():
            self.release()
            sleep(_LOOK_SECONDS)

    def release(self) -> None:
        """End the waits whose time has come, again and again."""
        senders, receivers = self._find_ends(monotonic() - self._began)
        self._spoil([receiver for receiver in receivers if receiver not in self._spoiled])
        for end in (*senders, *receivers):
            end.release()

    def _find_ends(self, seconds: float) -> tuple[list[PeerSender], list[PeerReceiver]]:
        lost, found = self._channels.lost, self._channels
        frees_all = seconds >= _ROOM_SECONDS
        takes_all = seconds >= _MESSAGE_SECONDS or lost is None
        return (
            [end for pair, end in found.senders.items() if frees_all or pair[1] == lost],
            [end for pair, end in found.receivers.items() if takes_all or pair[0] == lost],
        )

    def _spoil(self, receivers: Sequence[PeerReceiver]) -> None:
        """Fill rings with NaN before any stream reads from them what was never sent."""
        rescue = self._channels.rescue
        self._spoiled.update(receivers)
        if rescue is None or not receivers:
            return
        with suppress(DriverError):
            for receiver in receivers:
                receiver.spoil(rescue.cuda_stream)
            wait_until(lambda: is_stream_idle(rescue.cuda_stream), _SPOIL_SECONDS)


def mark_queued(channels: PeerChannels) -> Callable[[], bool]:
    """Return whether all messages are done that are queued now, as a call that can be repeated."""
    events = []
    with suppress(RuntimeError):
        for stream in {end.stream for end in channels.ends if end.stream is not None}:
            events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]  # untyped upstream
            events[-1].record(stream)

    def are_done() -> bool:
        try:
            return all(event.query() for event in events)  # type: ignore[no-untyped-call]  # upstream
        except RuntimeError:
            # The device itself has failed, and does nothing any more.
            return True

    return are_done


def wait_until(is_done: Callable[[], bool], seconds: float) -> bool:
    """Wait at most this long; return whether it is done."""
    limit = monotonic() + seconds
    while not is_done():
        if monotonic() > limit:
            return False
        sleep(_LOOK_SECONDS)
    return True
