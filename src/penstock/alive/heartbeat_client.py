"""The heartbeat of any rank but 0: it hears from rank 0 who is lost, and watches rank 0 itself."""

import socket
from logging import getLogger
from selectors import EVENT_READ, BaseSelector
from time import monotonic
from typing import Any

from penstock.alive.json_connection import ConnectionBrokenError, JsonConnection
from penstock.alive.lost_rank import LastActionOf, LostRank, ended, left, silent, with_last_action
from penstock.alive.rank_status import INITIAL_STATUS, RankStatus
from penstock.alive.timeouts import Timeouts
from penstock.errors import PipelineError

__all__ = ["HeartbeatClient"]

_LOGGER = getLogger(__name__)


class HeartbeatClient:
    """One rank, with a connection to the server at rank 0."""

    # Nobody waits until the server has heard what a client sends.
    is_acknowledged = True

    def __init__(
        self,
        rank: int,
        timeouts: Timeouts,
        selector: BaseSelector,
        last_action_of: LastActionOf,
        *,
        address: str,
        port: int,
        token: str,
    ) -> None:
        self._last_action_of = last_action_of
        self.rank = rank
        self._timeouts = timeouts
        self._last_heard = monotonic()
        self._server_status = INITIAL_STATUS
        self._goodbye: tuple[int, str] | None = None
        self._announced: LostRank | None = None
        limit = timeouts.silence_seconds
        try:
            connection = socket.create_connection((address, port), timeout=limit)
        except OSError as error:
            raise PipelineError(
                f"rank {rank} cannot reach rank 0 at {address}, port {port}: {error}; let the "
                "machines of a group open connections to one another"
            ) from error
        self._connection = JsonConnection(connection)
        self._is_open = True
        self._selector = selector
        selector.register(self._connection, EVENT_READ, self._read)
        self._send("hello", token, rank)

    def beat(self, status: RankStatus) -> None:
        """Send this rank's status to the server."""
        self._send("beat", status.to_values())

    def find_lost(self, status: RankStatus, now: float) -> LostRank | None:
        """Return the rank that the server has announced, or rank 0 if that is lost itself."""
        if self._announced is not None:
            return self._announced
        lost = self._find_lost_server(status, now)
        return None if lost is None else with_last_action(lost, self._last_action_of)

    def _find_lost_server(self, status: RankStatus, now: float) -> LostRank | None:
        if self._goodbye is not None:
            calls, reason = self._goodbye
            is_missed = status.is_inside and status.call > calls
            return left(0, reason, self._server_status) if is_missed else None
        if not self._is_open:
            return ended(0, self._server_status)
        silence = self._timeouts.silence_seconds
        is_silent = now - self._last_heard >= silence
        return silent(0, silence, self._server_status) if is_silent else None

    def restart_clocks(self, now: float) -> None:
        """Forget past silence, because this process was asleep and could hear nobody."""
        self._last_heard = now

    def announce(self, lost: LostRank) -> None:
        """Notify the server that it was given up, in case it comes back."""
        if self._announced is None:
            self._send("lost", *lost.to_values())

    def say_goodbye(self, calls: int, reason: str, status: RankStatus) -> None:
        """Notify the server that this rank leaves after this number of calls."""
        self._send("goodbye", calls, reason, status.to_values())

    def close(self) -> None:
        """Close the connection."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._connection)
            self._connection.close()

    def _read(self) -> None:
        try:
            for words in self._connection.receive():
                self._handle(words)
                self._last_heard = monotonic()
        except (ConnectionBrokenError, ValueError) as error:
            _LOGGER.debug("the connection to rank 0 was closed: %s", error)
            self.close()

    def _handle(self, words: list[Any]) -> None:
        match words:
            case ["beat", list(values)]:
                self._server_status = RankStatus.from_values(values)
            case ["lost", int(rank), str(what), str() | None as last, bool(may_be_done)]:
                self._announced = self._announced or LostRank(rank, what, last, may_be_done)
                self._send("acknowledged")
            case ["goodbye", int(calls), str(reason), list(values)]:
                self._server_status = RankStatus.from_values(values)
                self._goodbye = calls, reason
                self._send("acknowledged")
            case _:
                raise ConnectionBrokenError(f"rank 0 sent {words[0]!r}")

    def _send(self, *words: Any) -> None:
        if not self._is_open:
            return
        try:
            self._connection.send(*words)
        except ConnectionBrokenError:
            # What the server sent before it ended may still be there to be read.
            self._read()
