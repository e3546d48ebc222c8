"""Calls that run by turns, each in a thread of its own: exactly one runs at any time.

    member 0 (the caller)   ===|          |===|        |=== done
    member 1                    ====|          |=== done
                               ^    ^     turning points: the next member runs

Each member runs in its turn, and all others wait for theirs. So the order of all work is that of
the turning points, and no two members touch anything at the same time. If one member fails, the
others end at the turning point where they wait.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Lock

from penstock.step.overlap.generators import MemberGenerators
from penstock.step.overlap.thread_state import ThreadState
from penstock.step.overlap.turning import reaching

__all__ = ["MemberError", "run_by_turns"]


class MemberError(Exception):
    """The error of one member, which has ended all of them."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__(number, error)
        self.number, self.error = number, error


class _EndMember(BaseException):
    """Ends a member at its turning point, because another one has failed.

    Not an `Exception`, so that a model that catches errors does not keep it.
    """


@dataclass(slots=True)
class _Failure:
    number: int
    error: BaseException


class _Member:
    """One call of a group; `gate` opens when its turn comes."""

    def __init__(self, turns: "_Turns", number: int) -> None:
        self._turns, self.number = turns, number
        self.reached = 0
        self.is_done = False
        self.gate = Lock()
        self.gate.acquire()

    def reach(self) -> None:
        """Let the next member run, and wait for this one's turn."""
        self.reached += 1
        self._turns.hand_over(self)


class _Turns:
    """The members of one group of calls, and whose turn it is."""

    def __init__(self, count: int, generators: MemberGenerators) -> None:
        self.members = [_Member(self, number) for number in range(count)]
        self._generators = generators
        self._failure: _Failure | None = None

    def hand_over(self, member: _Member) -> None:
        """Let the next member run that is not done; return when it is this one's turn again."""
        if self._failure is None and (following := self._after(member)) is not None:
            self._give(member, following)
            self._await(member)
        if self._failure is not None:
            raise _EndMember

    def follow(self, member: _Member, call: Callable[[], None]) -> None:
        """Run a member in a thread of its own; the first turn of another one begins it."""
        member.gate.acquire()
        self._run(member, call)
        member.is_done = True
        following = self._after(member)
        # The caller waits for the last one.
        self._give(member, self.members[0] if following is None else following)

    def lead(self, call: Callable[[], None]) -> None:
        """Run the caller's own member, and then wait for all others."""
        member = self.members[0]
        self._run(member, call)
        member.is_done = True
        if (following := self._after(member)) is not None:
            self._give(member, following)
            self._await(member)

    def raise_failure(self) -> None:
        """Raise the error that has ended the members, if there was one."""
        failure = self._failure
        # An error holds the frames that hold this.
        self._failure = None
        if failure is None:
            return
        if isinstance(failure.error, Exception):
            raise MemberError(failure.number, failure.error) from failure.error
        raise failure.error

    def _run(self, member: _Member, call: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            with reaching(member):
                call()
        except _EndMember:
            pass
        except BaseException as error:
            if self._failure is None:
                self._failure = _Failure(member.number, error)

    def _after(self, member: _Member) -> _Member | None:
        """Return the next member in the circle that is not done."""
        circle = [*self.members[member.number + 1 :], *self.members[: member.number]]
        return next((other for other in circle if not other.is_done), None)

    def _give(self, member: _Member, following: _Member) -> None:
        self._generators.switch(member.number, following.number)
        following.gate.release()

    def _await(self, member: _Member) -> None:
        try:
            member.gate.acquire()
        except BaseException as error:
            # An interrupt, while another member runs: it must end before this one may continue.
            self._failure = self._failure or _Failure(member.number, error)
            self._await(member)


def _call_under(state: ThreadState, call: Callable[[], None]) -> None:
    with state.in_this_thread():
        call()


def run_by_turns(
    calls: Sequence[Callable[[], None]], pool: ThreadPoolExecutor, generators: MemberGenerators
) -> list[int]:
    """Run calls by turns, the first in this thread; return how often each has turned.

    Each of the others runs under this thread's settings. An error comes as a `MemberError`.
    """
    together, state = _Turns(len(calls), generators), ThreadState.of_this_thread()
    generators.begin()
    for member, call in zip(together.members[1:], calls[1:], strict=True):
        there = partial(_call_under, state, call)
        pool.submit(copy_context().run, together.follow, member, there)
    try:
        together.lead(calls[0])
    finally:
        generators.end()
    together.raise_failure()
    return [member.reached for member in together.members]
