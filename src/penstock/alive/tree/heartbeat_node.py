"""One rank's place in the heartbeat tree, which has the shape of `ranks/tree/shape.py`.

    rank 0             decides who is lost, and lets all ranks know
     |  ^
     v  |  up: beat (status of the ranks below that changed); joined, record, ended, silent,
    rank 1 ...         heard (of a loss) and goodbye of a rank below
     |  ^  down: beat, all here, record (of rank 0), lost, goodbye (of the sender)
     v  |
    rank 17 ...        decides whether its neighbours answer; passes everything on

Both ways: acknowledged; of a loss, once all ranks below have. A rank whose neighbour above is
silent or gone connects again, or to the next one above (`seeking.py`). If that does not answer
either, it is rank 0 that is lost; a rank that cannot reach anybody is lost itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from selectors import EVENT_READ, BaseSelector
from threading import Event
from time import monotonic
from typing import Any

from penstock.alive.failure_detector import Silence
from penstock.alive.flight_folder import last_action_in
from penstock.alive.lost_rank import LostRank
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts, patience_seconds
from penstock.alive.tree.member import Member
from penstock.alive.tree.messages import is_fact, read_lost, read_statuses
from penstock.alive.tree.neighbours import Neighbours
from penstock.alive.tree.registry import Registry
from penstock.alive.tree.root_view import RootView
from penstock.alive.tree.seeking import Seeker
from penstock.alive.tree.status_table import StatusTable
from penstock.ranks.tree.admission import Listener
from penstock.ranks.tree.json_connection import ConnectionBrokenError, JsonConnection

__all__ = ["HeartbeatNode"]

_LOGGER = getLogger(__name__)

# A rank looks for another connection after this share of the time after which it would be called
# lost itself: early enough that a link that is cut one way is replaced before.
_SEEK_SHARE = 1 / 3


class HeartbeatNode:
    """One rank among `size`; one thread calls its methods."""

    def __init__(
        self,
        me: Member,
        size: int,
        timeouts: Timeouts,
        selector: BaseSelector,
        *,
        address: str,
        token: str,
    ) -> None:
        self.me, self.rank, self._size = me, me.rank, size
        self._timeouts, self._selector = timeouts, selector
        now = monotonic()
        self._registry = Registry(me, size, timeouts, now) if me.rank == 0 else None
        self.seeker = Seeker(me, timeouts, token, now)
        self._listener = Listener(selector, address, token, self._admit)
        self.port = self._listener.port
        self._silence = Silence(patience_seconds(timeouts))
        self._near = Neighbours()
        # What this rank has to pass up of itself and of ranks below: at once, and again after it
        # was connected to another rank above.
        self._facts: list[list[Any]] = [["joined", me.rank, me.name, me.pipeline, me.rank]]
        self._statuses = StatusTable()
        self._has_left: set[int] = set()
        self._root = RootView()
        # Where the ranks of this pipeline keep their flight records, once it is built.
        self.own_records: Mapping[int, Path] = {}
        self._announced: LostRank | None = None
        self._unacknowledged: set[int] = set()
        self._owes_answer = False
        self._is_open = True
        # Set when all ranks have come.
        self.is_complete = Event()
        self._silence.hear(self._near.above, now)

    # ---- for the thread

    def beat(self, status: RankStatus) -> None:
        """Send this rank's status to its neighbours, with what has changed below it."""
        self._statuses.touch(self.rank, status)
        self._pass_up()
        self._near.send_down("beat", status.to_values())

    def find_lost(self, status: RankStatus, now: float) -> LostRank | None:
        """Return the rank that is lost by now, if one is; a stalled step goes to the log."""
        self._listener.drop_late(now)
        for rank in self._silence.find(now):
            if rank in self._near.children:
                self._silence.forget(rank)
                self._take_fact(["silent", rank, self.rank])
        if self._announced is not None:
            return self._announced
        if (registry := self._registry) is None:
            lost, known = self._look_up(status, now), self.seeker.members
        else:
            lost, known = registry.find_lost(status, now), registry.members
        if lost is None:
            return None
        # What the flight record says is newer than the last beat.
        records = self._root.records if registry is None else registry.records
        record = self.own_records.get(lost.rank) or records.get(lost.rank)
        last = None if record is None else last_action_in(record)
        return (lost if last is None else replace(lost, last=last)).named(known.get(lost.rank))

    def restart_clocks(self, now: float) -> None:
        """Forget past silence, because this process was asleep and could hear nobody."""
        self._silence.restart(now)
        if self._registry is not None:
            self._registry.detector.restart_clocks(now)

    def announce(self, lost: LostRank) -> None:
        """Report the lost rank to all neighbours, including the lost one in case it comes back."""
        if self._announced is None:
            self._announced = lost
            # Another one that is silent, as on the machine of the lost rank, will not answer.
            now = monotonic()
            answering = {rank for rank in self._near.children if self._silence.is_short(rank, now)}
            self._unacknowledged = answering - {lost.rank}
            self._near.send_down("lost", lost.to_values())
            self._near.send_up("lost", lost.to_values())

    @property
    def is_acknowledged(self) -> bool:
        """Whether every neighbour that can has acknowledged the loss or the goodbye."""
        return not self._unacknowledged

    @property
    def is_known_to_all(self) -> bool:
        """Whether all ranks have heard of the loss, as far as this one must wait for that."""
        lost, registry = self._announced, self._registry
        return lost is None or registry is None or registry.is_known_to_all(lost.rank)

    def note_record(self, path: str) -> None:
        """Let rank 0 know where this rank keeps its flight record, and all where rank 0 does."""
        self._take_fact(["record", self.rank, path])
        if self.rank == 0:
            self._share_record(path)

    def say_goodbye(self, calls: int, reason: str, status: RankStatus) -> None:
        """Notify the others that this rank leaves after this number of calls."""
        words = [self.rank, calls, reason, self.me.pipeline, status.to_values()]
        gone = None if self._announced is None else self._announced.rank
        self._unacknowledged = set() if gone == self.rank else self._near.ranks() - {gone}
        self._near.send_up("goodbye", *words)
        self._near.send_down("goodbye", *words)

    def close(self) -> None:
        """Close all connections; closing again does nothing."""
        if self._is_open:
            self._is_open = False
            self._listener.close()
            for connection in self._near.connections():
                self._selector.unregister(connection)
                connection.close()

    def release(self) -> None:
        """Close the descriptors only, as a forked copy of the process must."""
        self._listener.release()
        for connection in self._near.connections():
            connection.close()

    # ---- who is lost

    def _look_up(self, status: RankStatus, now: float) -> LostRank | None:
        """Return rank 0, or this rank, if nobody above answers any more."""
        if self._root.has_left:
            return self._root.find_lost(self.me.pipeline, status, self._timeouts)
        silence = self._silence.lasts(self._near.above, now)
        limit = self._timeouts.silence_seconds * _SEEK_SHARE
        if self._near.parent is not None and silence < limit:
            return None
        found = self.seeker.seek(now, self._has_left)
        if found is not None:
            self._attach(*found)
            return None
        return self.seeker.judge(now, silence, status, self._root.status)

    def _attach(self, above: int, connection: JsonConnection) -> None:
        """Take a rank as the one above, with everything that it does not know yet."""
        if self._near.parent is not None:
            self._drop_parent(self._near.parent)
        self._near.parent, self._near.above = connection, above
        self._silence.hear(above, monotonic())
        self._selector.register(connection, EVENT_READ, partial(self._read_parent, connection))
        self._facts[0][-1] = above
        for fact in self._facts:
            self._near.send_up(*fact)
        self._statuses.forget_passed()
        self._pass_up()

    def _admit(self, rank: int, connection: JsonConnection) -> None:
        """Take a rank below, which was proved to be one of us."""
        if not self._is_open or not 0 < rank < self._size or rank == self.rank:
            connection.close()
            return
        if rank in self._near.children:
            # It has opened another connection, since it did not hear us on the one before.
            self._drop_child(rank, self._near.children[rank], has_ended=False)
        self._near.children[rank] = connection
        self._silence.hear(rank, monotonic())
        self._selector.register(
            connection, EVENT_READ, partial(self._read_child, rank, connection)
        )
        if self.is_complete.is_set():
            self._near.send(connection, "all here")
        for path in self._root.records.values():
            self._near.send(connection, "record", path)
        if self._announced is not None:
            self._unacknowledged.add(rank)
            self._near.send(connection, "lost", self._announced.to_values())

    # ---- from below

    def _read_child(self, rank: int, connection: JsonConnection) -> None:
        if self._near.children.get(rank) is not connection:
            return
        try:
            for words in connection.receive():
                self._silence.hear(rank, monotonic())
                self._handle_child(rank, words)
        except (ConnectionBrokenError, ValueError) as error:
            _LOGGER.debug("the connection to rank %d was closed: %s", rank, error)
            self._drop_child(rank, connection, has_ended=True)

    def _handle_child(self, rank: int, words: list[Any]) -> None:
        match words:
            case ["beat", list(entries)]:
                self._take_statuses(entries)
            case ["acknowledged"]:
                self._unacknowledged.discard(rank)
                self._answer()
            case ["lost", list(values)]:
                self.announce(read_lost(values, self._size))
            case [kind, *_] if is_fact(words, self._size):
                self._take_fact(words)
                if [kind, words[1]] == ["goodbye", rank]:
                    self._has_left.add(rank)
                    self._near.send(self._near.children[rank], "acknowledged")
            case _:
                raise ConnectionBrokenError(f"rank {rank} sent {words[0]!r}")

    def _take_statuses(self, entries: list[Any]) -> None:
        is_urgent = False
        for below, status in read_statuses(entries, self._size):
            is_urgent |= status.failure is not None or status.broken is not None
            if self._statuses.take(below, status) and self._registry is not None:
                self._registry.take_status(below, status)
        if is_urgent:
            self._pass_up()

    def _take_fact(self, words: list[Any]) -> None:
        """Pass something up; rank 0 takes it itself."""
        if self._registry is None:
            self._facts.append(words)
            self._near.send_up(*words)
            return
        self._registry.take_fact(words)
        if self._registry.detector.is_complete and not self.is_complete.is_set():
            self.is_complete.set()
            self._near.send_down("all here")

    def _drop_child(self, rank: int, connection: JsonConnection, *, has_ended: bool) -> None:
        self._selector.unregister(connection)
        connection.close()
        if self._near.children.get(rank) is connection:
            del self._near.children[rank]
            self._silence.forget(rank)
            self._unacknowledged.discard(rank)
            self._answer()
            if has_ended and connection.was_used and rank not in self._has_left:
                self._take_fact(["ended", rank, self.rank])

    # ---- from above

    def _read_parent(self, connection: JsonConnection) -> None:
        if self._near.parent is not connection:
            return
        try:
            for words in connection.receive():
                self._silence.hear(self._near.above, monotonic())
                self._handle_parent(words)
        except (ConnectionBrokenError, ValueError) as error:
            _LOGGER.debug("the connection to rank %d was closed: %s", self._near.above, error)
            self._drop_parent(connection)

    def _handle_parent(self, words: list[Any]) -> None:
        match words:
            case ["beat", list(values)]:
                status = RankStatus.from_values(values)
                if self._near.above == 0:
                    self._root.status = status
            case ["all here"]:
                self.is_complete.set()
                self._near.send_down("all here")
            case ["record", str(path)]:
                self._share_record(path)
            case ["lost", list(values)]:
                self.announce(read_lost(values, self._size))
                if (heard := ["heard", self.rank]) not in self._facts:
                    self._take_fact(heard)
                self._owes_answer = True
                self._answer()
            case ["goodbye", int(above), int(calls), str(reason), int(pipeline), list(values)]:
                self._near.send_up("acknowledged")
                self._has_left.add(above)
                if above == 0:
                    self._root.leave(calls, reason, pipeline, RankStatus.from_values(values))
                    # Those below lose rank 0 too, and hear it from nobody else.
                    self._near.send_down(*words)
            case ["acknowledged"]:
                self._unacknowledged.discard(self._near.above)
            case _:
                raise ConnectionBrokenError(f"rank {self._near.above} sent {words[0]!r}")

    def _share_record(self, path: str) -> None:
        """Note where rank 0 keeps its flight record, and let those below know."""
        self._root.records[0] = path
        self._near.send_down("record", path)

    def _answer(self) -> None:
        """Acknowledge a loss, once all ranks right below this one have."""
        if self._owes_answer and not self._unacknowledged & self._near.children.keys():
            self._owes_answer = False
            self._near.send_up("acknowledged")

    def _drop_parent(self, connection: JsonConnection) -> None:
        self._selector.unregister(connection)
        connection.close()
        self._near.parent = None
        self._unacknowledged.discard(self._near.above)
        self.seeker.hurry()

    # ---- sending

    def _pass_up(self) -> None:
        for entries in self._statuses.take_changed():
            self._near.send_up("beat", entries)
