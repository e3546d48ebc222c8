"""Rings filled with NaN, in streams that nothing waits in."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from penstock.ranks.peer.driver import DriverError, create_stream, is_stream_idle

__all__ = ["Filler", "NanFiller", "Spoilable"]

# How long a stream is given before another one is tried: a device has fewer lines to wait in than
# it has streams, so that this one may share its line with a stream that is blocked.
_RETRY_SECONDS = 0.5
_MOST_STREAMS = 33


class Spoilable(Protocol):
    """A ring that can be filled."""

    def spoil(self, stream: int) -> None:
        """Fill it, after what is in the stream."""


class Filler(Protocol):
    """Fills rings; one thread calls its methods."""

    def fill(self, rings: Sequence[Spoilable], now: float) -> None:
        """Begin to fill rings, beside those that are not filled yet."""

    def is_filled(self, now: float) -> bool:
        """Return whether all rings so far are filled; try again what does not work."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing will be filled any more that was begun."""


class NanFiller:
    """Fills rings on a device."""

    def __init__(self, stream: int) -> None:
        self._streams = [stream]
        # The streams in which all present rings are being filled.
        self._begun: list[int] = []
        self._rings: list[Spoilable] = []
        self._began = 0.0

    def fill(self, rings: Sequence[Spoilable], now: float) -> None:
        """Begin to fill rings, beside those that are not filled yet."""
        self._rings.extend(rings)
        self._begun.clear()
        self._begin(now)

    def is_filled(self, now: float) -> bool:
        """Return whether all rings so far are filled; try again what does not work."""
        if any(_is_idle(stream, if_failed=False) for stream in self._begun):
            self._rings.clear()
            return True
        if self._rings and now - self._began >= _RETRY_SECONDS:
            if len(self._streams) < _MOST_STREAMS:
                with suppress(DriverError):
                    self._streams.append(create_stream())
            self._begin(now)
        return not self._rings

    @property
    def is_idle(self) -> bool:
        """Whether nothing will be filled any more that was begun."""
        return all(_is_idle(stream, if_failed=True) for stream in self._streams)

    def _begin(self, now: float) -> None:
        self._began, stream = now, self._streams[-1]
        with suppress(DriverError):
            for ring in self._rings:
                ring.spoil(stream)
            self._begun.append(stream)


def _is_idle(stream: int, *, if_failed: bool) -> bool:
    """Return whether a stream has done all; a device that has failed does nothing any more."""
    try:
        return is_stream_idle(stream)
    except DriverError:
        return if_failed
