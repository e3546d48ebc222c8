"""How a rank finds another one above it, and what it means if none answers."""

from enum import Enum, auto

from penstock.alive.lost_rank import LostRank, absent, cut_off, ended, silent
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts, patience_seconds
from penstock.alive.tree.member import Member
from penstock.ranks.tree.admission import NotAdmittedError, call
from penstock.ranks.tree.json_connection import JsonConnection
from penstock.ranks.tree.meeting import Contact
from penstock.ranks.tree.shape import ancestors_of

__all__ = ["Seeker"]

# How long the rank right above may take to come before a later one is asked.
_PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 1.0
_SHORT_PAUSE_SECONDS = 0.1
_MOST_CALL_SECONDS = 2.0


class _Answer(Enum):
    """What a rank above did when it was called."""

    NOT_HERE_YET = auto()
    # Its machine is there, but no process listens: it has ended.
    REFUSED = auto()
    # Its machine has taken the call, but its process does not answer: it was stopped.
    NO_ANSWER = auto()
    UNREACHABLE = auto()


class Seeker:
    """Calls the ranks above one, the nearest first, until one answers."""

    def __init__(self, me: Member, timeouts: Timeouts, token: str, now: float) -> None:
        self._me = me
        self._timeouts = timeouts
        self._token = token
        self._begin = self._next = now
        self._seconds = min(_MOST_CALL_SECONDS, timeouts.silence_seconds / 8)
        self._root_answer = _Answer.NOT_HERE_YET
        self._has_found = False
        self._error = ""
        # Where the ranks above can be reached, filled as they come; and who can be judged here.
        self.contacts: dict[int, Contact] = {}
        self.members = {me.rank: me}

    def add_contact(self, rank: int, contact: Contact) -> None:
        """Note where a rank above can be reached."""
        self.members[rank] = Member(rank, contact.name)
        self.contacts[rank] = contact
        self.hurry()

    def hurry(self) -> None:
        """Look for another rank soon, because a connection broke."""
        self._next = self._begin

    def seek(self, now: float, gone: set[int]) -> tuple[int, JsonConnection] | None:
        """Return a rank above that has answered, and the connection to it; wait for moments."""
        if now < self._next:
            return None
        self._next = now + _PAUSE_SECONDS
        for rank in ancestors_of(self._me.rank):
            if rank in gone:
                continue
            if rank not in self.contacts and now - self._begin < _PATIENCE_SECONDS:
                self._next = now + _SHORT_PAUSE_SECONDS
                return None
            answer = self._call(rank)
            if isinstance(answer, JsonConnection):
                self._has_found = True
                return rank, answer
            self._root_answer = answer
            if answer is _Answer.NO_ANSWER and self._is_patient(now):
                return None
        if self._root_answer is _Answer.NO_ANSWER:
            # It may be about to end: its connections are closed one after the other.
            self._next = now + _SHORT_PAUSE_SECONDS
        return None

    def _is_patient(self, now: float) -> bool:
        """Return whether a rank above may be busy, because all ranks are connecting just now.

        If they turned to the ranks above it, all of a large tree would end up at rank 0.
        """
        return not self._has_found and now - self._begin < self._timeouts.silence_seconds / 2

    def _call(self, rank: int) -> JsonConnection | _Answer:
        contact = self.contacts.get(rank)
        if contact is None:
            return _Answer.NOT_HERE_YET
        me, token = self._me.rank, self._token
        try:
            return call(contact.address, contact.port, token=token, rank=me, seconds=self._seconds)
        except ConnectionRefusedError:
            return _Answer.REFUSED
        except NotAdmittedError:
            return _Answer.NO_ANSWER
        except OSError as error:
            self._error = str(error)
            return _Answer.UNREACHABLE

    def judge(
        self, now: float, silence: float, status: RankStatus, root_status: RankStatus
    ) -> LostRank | None:
        """Return who is lost, after nobody above has answered for this long.

        `root_status` is the last one of rank 0, which is the last that everybody looks for.
        """
        limit = self._timeouts.silence_seconds
        is_late = silence >= patience_seconds(self._timeouts)
        match self._root_answer:
            case _Answer.REFUSED:
                return ended(0, root_status)
            case _Answer.NO_ANSWER if is_late:
                return silent(0, limit, root_status)
            case _Answer.UNREACHABLE if is_late:
                return cut_off(self._me.rank, self._error, status)
            case _Answer.NOT_HERE_YET if now - self._begin >= self._timeouts.join_seconds:
                return absent(0, self._timeouts.join_seconds)
        return None
