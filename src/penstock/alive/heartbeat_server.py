"""The heartbeat of rank 0, which finds out who is lost and notifies all ranks.

    rank k --- hello, beat ... acknowledged, lost, goodbye -->  server
    rank k <------------------------- beat ... lost, goodbye ---  server

A beat carries the status of its rank. If another rank sends "lost", it has given up the server.
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
from penstock.alive.lost_rank import LastActionOf, LostRank, with_last_action
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts

__all__ = ["HeartbeatServer"]

_LOGGER = getLogger(__name__)

# How many connections may be open that have not said which rank they are.
_MOST_STRANGERS = 64


class HeartbeatServer:
    """Rank 0, with a connection to every other rank."""

    rank = 0

    def __init__(
        self,
        num_ranks: int,
        timeouts: Timeouts,
        selector: BaseSelector,
        last_action_of: LastActionOf,
        *,
        address: str,
        token: str,
    ) -> None:
        self._last_action_of = last_action_of
        self._num_ranks = num_ranks
        self._token = token
        self._detector = FailureDetector(num_ranks, timeouts, monotonic())
        self._strangers: list[JsonConnection] = []
        self._ranks: dict[JsonConnection, int] = {}
        # Set if another rank has given up this one.
        self._given_up: LostRank | None = None
        self._unacknowledged: set[int] = set()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=num_ranks)
        self._listener.setblocking(False)
        self._selector = selector
        selector.register(self._listener, EVENT_READ, self._admit)

    @property
    def port(self) -> int:
        """The port at which the other ranks connect."""
        port: int = self._listener.getsockname()[1]
        return port

    def beat(self, status: RankStatus) -> None:
        """Send this rank's status to every other rank."""
        self._send_to_all("beat", status.to_values())

    def find_lost(self, status: RankStatus, now: float) -> LostRank | None:
        """Return the rank that is lost by now, if one is; a stalled step goes to the log."""
        if self._given_up is not None:
            return self._given_up
        self._detector.update(self.rank, status, now)
        lost = self._detector.find_lost(now)
        if lost is not None:
            return with_last_action(lost, self._last_action_of)
        if (report := self._detector.find_stall(now)) is not None:
            _LOGGER.warning("%s", report)
        return None

    def restart_clocks(self, now: float) -> None:
        """Forget past silence, because this process was asleep and could hear nobody."""
        self._detector.restart_clocks(now)

    def announce(self, lost: LostRank) -> None:
        """Report the lost rank to every rank, including the lost one in case it comes back."""
        self._unacknowledged = set(self._ranks.values()) - {lost.rank}
        self._send_to_all("lost", *lost.to_values())

    @property
    def is_acknowledged(self) -> bool:
        """Whether every rank that can has acknowledged the loss or the goodbye."""
        return not self._unacknowledged

    def say_goodbye(self, calls: int, reason: str, status: RankStatus) -> None:
        """Notify every rank that this one leaves after this number of calls."""
        self._unacknowledged = set(self._ranks.values())
        self._send_to_all("goodbye", calls, reason, status.to_values())

    def close(self) -> None:
        """Close all connections."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for connection in (*self._strangers, *self._ranks):
            self._selector.unregister(connection)
            connection.close()

    def _admit(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            # The caller is gone again.
            return
        connection = JsonConnection(accepted)
        self._strangers.append(connection)
        self._selector.register(connection, EVENT_READ, partial(self._read, connection))
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop(self._strangers[0])

    def _read(self, connection: JsonConnection) -> None:
        try:
            for words in connection.receive():
                if connection in self._ranks:
                    self._handle(self._ranks[connection], words)
                else:
                    self._identify(connection, words)
        except (ConnectionBrokenError, ValueError) as error:
            _LOGGER.debug("a connection was closed: %s", error)
            self._drop(connection)

    def _identify(self, connection: JsonConnection, words: list[Any]) -> None:
        """Accept a rank that is missing, if it knows the token."""
        match words:
            case ["hello", str(token), int(rank)] if (
                hmac.compare_digest(token.encode(), self._token.encode())
                and 0 < rank < self._num_ranks
                and rank not in self._ranks.values()
            ):
                self._strangers.remove(connection)
                self._ranks[connection] = rank
            case _:
                raise ConnectionBrokenError("the caller does not belong to this pipeline")

    def _handle(self, rank: int, words: list[Any]) -> None:
        match words:
            case ["beat", list(values)]:
                self._detector.update(rank, RankStatus.from_values(values), monotonic())
            case ["goodbye", int(calls), str(reason), list(values)]:
                self._detector.update(rank, RankStatus.from_values(values), monotonic())
                self._detector.leave(rank, calls, reason)
            case ["acknowledged"]:
                self._unacknowledged.discard(rank)
            case ["lost", 0, str(what), str() | None as last, bool(may_be_done)]:
                self._given_up = LostRank(0, what, last, may_be_done)
            case _:
                raise ConnectionBrokenError(f"rank {rank} sent {words[0]!r}")

    def _drop(self, connection: JsonConnection) -> None:
        self._selector.unregister(connection)
        connection.close()
        if connection in self._ranks:
            rank = self._ranks.pop(connection)
            self._unacknowledged.discard(rank)
            self._detector.end(rank)
        else:
            self._strangers.remove(connection)

    def _send_to_all(self, *words: Any) -> None:
        for connection in list(self._ranks):
            try:
                connection.send(*words)
            except ConnectionBrokenError:
                # What it sent before it ended may still be there to be read.
                self._read(connection)
