"""The end of the lifeline at rank 0, which judges all ranks and tells them.

    rank k --- hello, beat ... heard, verdict, goodbye -->  hub
    rank k <---------------- beat ... verdict, goodbye ---  hub

A beat tells where its rank is. The verdict of another rank is one on the hub, which was silent.
"""

import hmac
import socket
from functools import partial
from logging import getLogger
from selectors import EVENT_READ, BaseSelector
from time import monotonic
from typing import Any

from penstock.alive.failure_detector import FailureDetector
from penstock.alive.json_connection import ConnectionBrokenError, JsonConnection
from penstock.alive.lost_rank import LastOf, LostRank, with_last
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts

__all__ = ["HeartbeatServer"]

_LOGGER = getLogger(__name__)

# How many callers may be there that have not said who they are.
_MOST_STRANGERS = 64


class HeartbeatServer:
    """Rank 0, with a line to every other rank."""

    rank = 0

    def __init__(
        self,
        num_ranks: int,
        watch: Timeouts,
        selector: BaseSelector,
        last_of: LastOf,
        *,
        address: str,
        token: str,
    ) -> None:
        self._last_of = last_of
        self._num_ranks = num_ranks
        self._token = token
        self._judge = FailureDetector(num_ranks, watch, monotonic())
        self._strangers: list[JsonConnection] = []
        self._ranks: dict[JsonConnection, int] = {}
        self._told: LostRank | None = None
        self._unheard: set[int] = set()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=num_ranks)
        self._listener.setblocking(False)
        self._selector = selector
        selector.register(self._listener, EVENT_READ, self._admit)

    @property
    def port(self) -> int:
        """Where the other ranks are expected."""
        port: int = self._listener.getsockname()[1]
        return port

    def beat(self, place: RankStatus) -> None:
        """Tell every rank where this one is."""
        self._say_to_all("beat", place.to_values())

    def judge(self, place: RankStatus, now: float) -> LostRank | None:
        """The rank that is lost by now, if one is; a stalled step goes to the log."""
        if self._told is not None:
            return self._told
        self._judge.hear(self.rank, place, now)
        verdict = self._judge.find_lost(now)
        if verdict is not None:
            return with_last(verdict, self._last_of)
        if (report := self._judge.find_stall(now)) is not None:
            _LOGGER.warning("%s", report)
        return None

    def forgive(self, now: float) -> None:
        """This process has slept: that it has heard nobody means nothing."""
        self._judge.forgive(now)

    def proclaim(self, verdict: LostRank) -> None:
        """Tell every rank who is lost, the lost one too in case that it comes back."""
        self._unheard = set(self._ranks.values()) - {verdict.rank}
        self._say_to_all("verdict", *verdict.to_values())

    @property
    def is_heard(self) -> bool:
        """Whether all that can have heard the verdict, or the goodbye."""
        return not self._unheard

    def part(self, calls: int, why: str, place: RankStatus) -> None:
        """Say goodbye to every rank, after so many calls."""
        self._unheard = set(self._ranks.values())
        self._say_to_all("goodbye", calls, why, place.to_values())

    def close(self) -> None:
        """Let go of all connections."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for line in (*self._strangers, *self._ranks):
            self._selector.unregister(line)
            line.close()

    def _admit(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The caller has gone again.
            return
        line = JsonConnection(connection)
        self._strangers.append(line)
        self._selector.register(line, EVENT_READ, partial(self._read, line))
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop(self._strangers[0])

    def _read(self, line: JsonConnection) -> None:
        try:
            for words in line.hear():
                if line in self._ranks:
                    self._take_in(self._ranks[line], words)
                else:
                    self._meet(line, words)
        except (ConnectionBrokenError, ValueError) as error:
            _LOGGER.debug("a line was closed: %s", error)
            self._drop(line)

    def _meet(self, line: JsonConnection, words: list[Any]) -> None:
        """Whoever knows the token, and is a rank that is missing, is no stranger."""
        match words:
            case ["hello", str(token), int(rank)] if (
                hmac.compare_digest(token.encode(), self._token.encode())
                and 0 < rank < self._num_ranks
                and rank not in self._ranks.values()
            ):
                self._strangers.remove(line)
                self._ranks[line] = rank
            case _:
                raise ConnectionBrokenError("the caller does not belong to this pipeline")

    def _take_in(self, rank: int, words: list[Any]) -> None:
        match words:
            case ["beat", list(values)]:
                self._judge.hear(rank, RankStatus.from_values(values), monotonic())
            case ["goodbye", int(calls), str(why), list(values)]:
                self._judge.hear(rank, RankStatus.from_values(values), monotonic())
                self._judge.leave(rank, calls, why)
            case ["heard"]:
                self._unheard.discard(rank)
            case ["verdict", 0, str(what), str() | None as last, bool(is_quiet)]:
                self._told = LostRank(0, what, last, is_quiet)
            case _:
                raise ConnectionBrokenError(f"rank {rank} said {words[0]!r}")

    def _drop(self, line: JsonConnection) -> None:
        self._selector.unregister(line)
        line.close()
        if line in self._ranks:
            rank = self._ranks.pop(line)
            self._unheard.discard(rank)
            self._judge.end(rank)
        else:
            self._strangers.remove(line)

    def _say_to_all(self, *words: Any) -> None:
        for line in list(self._ranks):
            try:
                line.say(*words)
            except ConnectionBrokenError:
                # What it said before it went may still be there to be read.
                self._read(line)
