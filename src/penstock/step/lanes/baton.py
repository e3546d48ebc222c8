"""Calls that run by turns, each in a thread of its own: exactly one runs at any time.

    lane 0 (the caller)   ===|          |===|        |=== done
    lane 1                    ====|          |=== done
                             ^    ^     turning points: the baton goes to the next lane

Who has the baton runs; all others wait for it. So the order of all work is that of the turning
points, and no two lanes touch anything at the same time. If one lane fails, the others end at the
turning point where they wait.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Lock

from penstock.step.lanes.generators import LaneGenerators
from penstock.step.lanes.thread_state import ThreadState
from penstock.step.lanes.turning import reaching

__all__ = ["LaneError", "run_by_turns"]


class LaneError(Exception):
    """The error of one lane, which has ended all of them."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__(number, error)
        self.number, self.error = number, error


class _EndLane(BaseException):
    """Ends a lane at its turning point, because another one has failed.

    Not an `Exception`, so that a model that catches errors does not keep it.
    """


@dataclass(slots=True)
class _Failure:
    number: int
    error: BaseException


class _Lane:
    """One call among several; `gate` opens when it gets the baton."""

    def __init__(self, lanes: "_Lanes", number: int) -> None:
        self._lanes, self.number = lanes, number
        self.reached = 0
        self.is_done = False
        self.gate = Lock()
        self.gate.acquire()

    def reach(self) -> None:
        """Hand the baton on, and wait until it is back."""
        self.reached += 1
        self._lanes.hand_over(self)


class _Lanes:
    """The lanes of one group of calls, and who is next."""

    def __init__(self, count: int, generators: LaneGenerators) -> None:
        self.lanes = [_Lane(self, number) for number in range(count)]
        self._generators = generators
        self._failure: _Failure | None = None

    def hand_over(self, lane: _Lane) -> None:
        """Let the next lane run that is not done; return when this one has the baton again."""
        if self._failure is None and (following := self._after(lane)) is not None:
            self._give(lane, following)
            self._await(lane)
        if self._failure is not None:
            raise _EndLane

    def follow(self, lane: _Lane, call: Callable[[], None]) -> None:
        """Run a lane in a thread of its own; the first turn of another one begins it."""
        lane.gate.acquire()
        self._run(lane, call)
        lane.is_done = True
        following = self._after(lane)
        # The caller waits for the last one.
        self._give(lane, self.lanes[0] if following is None else following)

    def lead(self, call: Callable[[], None]) -> None:
        """Run the caller's own lane, and then wait for all others."""
        lane = self.lanes[0]
        self._run(lane, call)
        lane.is_done = True
        if (following := self._after(lane)) is not None:
            self._give(lane, following)
            self._await(lane)

    def raise_failure(self) -> None:
        """Raise the error that has ended the lanes, if there was one."""
        failure = self._failure
        # An error holds the frames that hold this.
        self._failure = None
        if failure is None:
            return
        if isinstance(failure.error, Exception):
            raise LaneError(failure.number, failure.error) from failure.error
        raise failure.error

    def _run(self, lane: _Lane, call: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            with reaching(lane):
                call()
        except _EndLane:
            pass
        except BaseException as error:
            if self._failure is None:
                self._failure = _Failure(lane.number, error)

    def _after(self, lane: _Lane) -> _Lane | None:
        """Return the next lane in the circle that is not done."""
        circle = [*self.lanes[lane.number + 1 :], *self.lanes[: lane.number]]
        return next((other for other in circle if not other.is_done), None)

    def _give(self, lane: _Lane, following: _Lane) -> None:
        self._generators.switch(lane.number, following.number)
        following.gate.release()

    def _await(self, lane: _Lane) -> None:
        try:
            lane.gate.acquire()
        except BaseException as error:
            # An interrupt, while another lane runs: it must end before this one may continue.
            self._failure = self._failure or _Failure(lane.number, error)
            self._await(lane)


def _call_under(state: ThreadState, call: Callable[[], None]) -> None:
    with state.in_this_thread():
        call()


def run_by_turns(
    calls: Sequence[Callable[[], None]], pool: ThreadPoolExecutor, generators: LaneGenerators
) -> list[int]:
    """Run calls by turns, the first in this thread; return how often each has turned.

    Each of the others runs under this thread's settings. An error comes as a `LaneError`.
    """
    together, state = _Lanes(len(calls), generators), ThreadState.of_this_thread()
    generators.begin()
    for lane, call in zip(together.lanes[1:], calls[1:], strict=True):
        there = partial(_call_under, state, call)
        pool.submit(copy_context().run, together.follow, lane, there)
    try:
        together.lead(calls[0])
    finally:
        generators.end()
    together.raise_failure()
    return [lane.reached for lane in together.lanes]
