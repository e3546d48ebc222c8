"""The end of the lifeline at any rank but 0: it hears the hub's verdicts, and judges the hub."""

import socket
from logging import getLogger
from selectors import EVENT_READ, BaseSelector
from time import monotonic
from typing import Any

from penstock.alive.json_connection import ConnectionBrokenError, JsonConnection
from penstock.alive.lost_rank import LastOf, LostRank, ended, left, silent, with_last
from penstock.alive.rank_status import NOWHERE, RankStatus
from penstock.alive.timeouts import Timeouts
from penstock.errors import PipelineError

__all__ = ["HeartbeatClient"]

_LOGGER = getLogger(__name__)


class HeartbeatClient:
    """One rank, with a line to the hub."""

    # Nobody waits for what a spoke has to tell.
    is_heard = True

    def __init__(
        self,
        rank: int,
        watch: Timeouts,
        selector: BaseSelector,
        last_of: LastOf,
        *,
        address: str,
        port: int,
        token: str,
    ) -> None:
        self._last_of = last_of
        self.rank = rank
        self._watch = watch
        self._heard = monotonic()
        self._hub = NOWHERE
        self._goodbye: tuple[int, str] | None = None
        self._told: LostRank | None = None
        try:
            connection = socket.create_connection((address, port), timeout=watch.silence_seconds)
        except OSError as error:
            raise PipelineError(
                f"rank {rank} cannot reach rank 0 at {address}, port {port}: {error}; let the "
                "machines of a group open connections to one another"
            ) from error
        self._line = JsonConnection(connection)
        self._is_open = True
        self._selector = selector
        selector.register(self._line, EVENT_READ, self._read)
        self._say("hello", token, rank)

    def beat(self, place: RankStatus) -> None:
        """Tell the hub where this rank is."""
        self._say("beat", place.to_values())

    def judge(self, place: RankStatus, now: float) -> LostRank | None:
        """What the hub has told, or what became of the hub."""
        if self._told is not None:
            return self._told
        verdict = self._judge_hub(place, now)
        return None if verdict is None else with_last(verdict, self._last_of)

    def _judge_hub(self, place: RankStatus, now: float) -> LostRank | None:
        if self._goodbye is not None:
            calls, why = self._goodbye
            is_missed = place.is_inside and place.call > calls
            return left(0, why, self._hub) if is_missed else None
        if not self._is_open:
            return ended(0, self._hub)
        silence = self._watch.silence_seconds
        return silent(0, silence, self._hub) if now - self._heard >= silence else None

    def forgive(self, now: float) -> None:
        """This process has slept: that it has heard nobody means nothing."""
        self._heard = now

    def proclaim(self, verdict: LostRank) -> None:
        """Tell the hub that it was given up, in case that it comes back."""
        if self._told is None:
            self._say("verdict", *verdict.to_values())

    def part(self, calls: int, why: str, place: RankStatus) -> None:
        """Say goodbye to the hub, after so many calls."""
        self._say("goodbye", calls, why, place.to_values())

    def close(self) -> None:
        """Let go of the connection."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._line)
            self._line.close()

    def _read(self) -> None:
        try:
            for words in self._line.hear():
                self._take_in(words)
                self._heard = monotonic()
        except (ConnectionBrokenError, ValueError) as error:
            _LOGGER.debug("the line to rank 0 was closed: %s", error)
            self.close()

    def _take_in(self, words: list[Any]) -> None:
        match words:
            case ["beat", list(values)]:
                self._hub = RankStatus.from_values(values)
            case ["verdict", int(rank), str(what), str() | None as last, bool(is_quiet)]:
                self._told = self._told or LostRank(rank, what, last, is_quiet)
                self._say("heard")
            case ["goodbye", int(calls), str(why), list(values)]:
                self._hub = RankStatus.from_values(values)
                self._goodbye = calls, why
                self._say("heard")
            case _:
                raise ConnectionBrokenError(f"rank 0 said {words[0]!r}")

    def _say(self, *words: Any) -> None:
        if not self._is_open:
            return
        try:
            self._line.say(*words)
        except ConnectionBrokenError:
            # What the hub said before it went may still be there to be read.
            self._read()
