"""How the waits of a device end when a rank is gone.

Messages of that rank will not come. Before the streams that wait for them continue, its rings are
filled with NaN, which goes the way of every number that is computed from them. A wait ends only
when that cannot make a device take bytes for others (`release_rules`). Messages between the
remaining ranks therefore still come, with NaN in them, as far as they were queued.

If a wait cannot be ended, because its ring cannot be filled or a device does not finish a step
that is complete, the process is ended: numbers are right, or NaN, or there are none.
"""

import faulthandler
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from time import monotonic, sleep

import torch

from penstock.ranks.faults import EXIT_CODE
from penstock.ranks.peer.channel import PeerReceiver, PeerSender
from penstock.ranks.peer.driver import DriverError, use_context
from penstock.ranks.peer.nan_fill import Filler, NanFiller
from penstock.ranks.peer.opening import PeerChannels

__all__ = ["Release", "abort", "mark_queued", "wait_until"]

# How long the remaining ranks are given to say what they have queued last.
_ANNOUNCE_SECONDS = 3.0
# How long a wait that cannot be ended may last while no device does anything; far longer than
# anything that a device does at a time.
_STUCK_SECONDS = 600.0
_LOOK_SECONDS = 0.005
_LONGEST_LOOK_SECONDS = 1.0
_STDERR = 2


def abort(channels: PeerChannels, lost: int | None) -> None:
    """End the waits for a rank, or for all if it is not known which one; from any thread."""
    if not channels.ends or not channels.abort_once.acquire(blocking=False):
        return
    for end in channels.ends:
        end.abort()
    assert channels.release_stream is not None, "it was made before the first end"
    release = Release(channels, lost, NanFiller(channels.release_stream.cuda_stream), monotonic())
    thread = Thread(target=_run, args=(release, channels), name="penstock-release", daemon=True)
    channels.release_thread = thread
    thread.start()


def _run(release: "Release", channels: PeerChannels) -> None:
    with suppress(DriverError):
        use_context(channels.context)
    # Devices of the others may still write counters, and so let waits begin again.
    is_done: Callable[[], bool] | None = None
    while is_done is None or not (is_done() and release.is_filler_idle):
        is_all_queued = release.look(monotonic())
        if is_done is None and is_all_queued:
            is_done = mark_queued(channels)
        if release.is_stuck:
            _end_process()
        sleep(_LOOK_SECONDS)


class Release:
    """The waits that are ended by now, and those that may not end yet."""

    def __init__(
        self, channels: PeerChannels, lost: int | None, filler: Filler, now: float
    ) -> None:
        self._channels = channels
        self._lost = lost
        self._filler = filler
        self._began = self._looked = now
        # How long no device has done anything while this thread was running.
        self._quiet_seconds = 0.0
        self._counts: list[tuple[int, int]] = []
        self._filling: set[PeerReceiver] = set()
        self._released: set[PeerSender | PeerReceiver] = set()

    def look(self, now: float) -> bool:
        """End the waits whose time has come, again and again; return whether all is queued."""
        ends = self._channels.ends
        queued = [end for end in ends if not end.is_queueing]
        for end in queued:
            end.announce_end()
        self._fill_rings(now)
        if self._filling and self._filler.is_filled(now):
            self._released |= self._filling
            self._filling.clear()
        for (_, destination), sender in self._channels.senders.items():
            if sender.may_overwrite(
                is_given_up=self._is_given_up(destination, now),
                is_gone=self._channels.is_gone(destination),
            ):
                self._released.add(sender)
        for end in self._released:
            end.release()
        self._note_progress(now)
        return len(queued) == len(ends)

    @property
    def is_stuck(self) -> bool:
        """Whether a wait may not end, and nothing has happened for long.

        A rank that has reported its end takes its time, or ends itself.
        """
        if self._quiet_seconds < _STUCK_SECONDS:
            return False
        unanswered = [end for end in self._channels.ends if not end.other.is_final]
        return any(
            end.is_waiting for end in {*unanswered, *self._filling} if end not in self._released
        )

    @property
    def is_filler_idle(self) -> bool:
        """Whether no ring is being filled."""
        return self._filler.is_idle

    def _fill_rings(self, now: float) -> None:
        """Begin to fill the rings whose waits may end after that.

        Also while something is taken: a host may be blocked there until its device continues.
        """
        found = [
            receiver
            for (source, _), receiver in self._channels.receivers.items()
            if receiver not in self._released | self._filling
            and not receiver.is_placing
            and receiver.may_read_nan(
                is_given_up=self._is_given_up(source, now), is_gone=self._channels.is_gone(source)
            )
        ]
        if found:
            self._filling.update(found)
            self._filler.fill(found, now)

    def _is_given_up(self, rank: int, now: float) -> bool:
        """Return whether a rank is not expected to say what it has queued last."""
        return self._lost in (None, rank) or now - self._began >= _ANNOUNCE_SECONDS

    def _note_progress(self, now: float) -> None:
        counts = [end.counts for end in self._channels.ends]
        # A process that was stopped has not been quiet all that time.
        self._quiet_seconds += min(now - self._looked, _LONGEST_LOOK_SECONDS)
        self._looked = now
        if counts != self._counts:
            self._counts, self._quiet_seconds = counts, 0.0


def _end_process() -> None:
    text = (
        "penstock: the device of this process waits for a rank that is lost, and cannot be freed "
        "without numbers that may be wrong; the process ends now with exit code "
        f"{EXIT_CODE}\n"
    )
    os.write(_STDERR, text.encode())
    faulthandler.dump_traceback(_STDERR)
    os._exit(EXIT_CODE)


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
