"""Which waits end, and when: counters and rings in host memory take the place of a device's."""

from collections.abc import Sequence

import pytest

from penstock.ranks.peer.nan_fill import Spoilable
from penstock.ranks.peer.opening import PeerChannels
from penstock.ranks.peer.release import Release
from penstock.ranks.peer.release_rules import LastQueued


class End:
    """An end of a channel that counts what is done to it."""

    def __init__(self, *, may_end: bool = True) -> None:
        self.may_end = may_end
        self.is_queueing = self.is_placing = False
        self.is_waiting = True
        self.other = LastQueued(0, is_final=False)
        self.counts = (0, 0)
        self.releases = self.announcements = 0
        self.given_up = False

    def announce_end(self) -> None:
        self.announcements += 1

    def release(self) -> None:
        self.releases += 1

    def may_read_nan(self, *, is_given_up: bool, is_gone: bool) -> bool:
        del is_gone
        self.given_up = is_given_up
        return self.may_end

    may_overwrite = may_read_nan

    def spoil(self, stream: int) -> None:
        """Be filled."""


class SlowFiller:
    """Fills when the test says so."""

    def __init__(self) -> None:
        self.rings: list[Spoilable] = []
        self.is_done = False
        self.is_idle = True

    def fill(self, rings: Sequence[Spoilable], now: float) -> None:
        del now
        self.rings.extend(rings)

    def is_filled(self, now: float) -> bool:
        del now
        return self.is_done


@pytest.fixture
def ends() -> dict[str, End]:
    return {"from 0": End(), "to 0": End(), "from 2": End(may_end=False)}


@pytest.fixture
def channels(ends: dict[str, End]) -> PeerChannels:
    """Those of rank 1."""
    return PeerChannels(
        senders={(1, 0): ends["to 0"]},  # type: ignore[dict-item]  # has what a release asks for
        receivers={(0, 1): ends["from 0"], (2, 1): ends["from 2"]},  # type: ignore[dict-item]  # too
    )


# A ring that could not be filled within half a second was read all the same.
def test_no_wait_for_a_message_ends_before_its_ring_is_filled(
    channels: PeerChannels, ends: dict[str, End]
) -> None:
    filler = SlowFiller()
    release = Release(channels, 0, filler, now=0.0)
    for second in range(700):
        release.look(float(second))
    assert filler.rings == [ends["from 0"]]
    assert [ends["from 0"].releases, ends["to 0"].releases] == [0, 700]
    assert release.is_stuck
    filler.is_done = True
    release.look(700.0)
    assert ends["from 0"].releases == 1
    assert ends["from 2"].releases == 0


# A wait that was queued while an abort ran was released by nobody.
def test_what_is_being_queued_is_waited_for(channels: PeerChannels, ends: dict[str, End]) -> None:
    release = Release(channels, 0, SlowFiller(), now=0.0)
    ends["from 0"].is_queueing = True
    assert not release.look(0.0)
    assert ends["from 0"].announcements == 0
    ends["from 0"].is_queueing = False
    assert release.look(0.1)
    assert ends["from 0"].announcements == 1


def test_others_are_given_up_only_if_they_say_nothing_for_seconds(
    channels: PeerChannels, ends: dict[str, End]
) -> None:
    release = Release(channels, 0, SlowFiller(), now=10.0)
    release.look(10.0)
    assert ends["to 0"].given_up
    assert not ends["from 2"].given_up
    release.look(13.0)
    assert ends["from 2"].given_up


def test_a_device_that_still_does_something_is_not_stuck(
    channels: PeerChannels, ends: dict[str, End]
) -> None:
    release = Release(channels, 0, SlowFiller(), now=0.0)
    for second in range(2000):
        ends["from 2"].counts = (second // 300, 0)
        release.look(float(second))
    assert not release.is_stuck
    # A process that was stopped for an hour is not stuck either.
    release.look(6000.0)
    assert not release.is_stuck


def test_a_rank_that_lives_may_take_any_time(channels: PeerChannels, ends: dict[str, End]) -> None:
    filler = SlowFiller()
    filler.is_done = True
    release = Release(channels, 0, filler, now=0.0)
    ends["from 2"].other = LastQueued(5, is_final=True)
    for second in range(2000):
        release.look(float(second))
    assert ends["from 2"].releases == 0
    assert not release.is_stuck
    ends["from 2"].other = LastQueued(5, is_final=False)
    assert release.is_stuck


# A host that has filled the queue of its stream stays in there until the device continues.
def test_a_ring_is_filled_while_its_host_is_blocked_in_a_take(
    channels: PeerChannels, ends: dict[str, End]
) -> None:
    filler = SlowFiller()
    release = Release(channels, 0, filler, now=0.0)
    ends["from 0"].is_queueing = ends["from 0"].is_placing = True
    release.look(0.0)
    assert filler.rings == []
    ends["from 0"].is_placing = False
    assert not release.look(0.1)
    assert filler.rings == [ends["from 0"]]
