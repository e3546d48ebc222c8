"""Work beside the training: done in a thread of its own, waited for, or given up."""

import atexit
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from penstock.ranks.faults import LinkLostError

__all__ = ["Background"]


# How long work may still take when the program fails or ends.
_GRACE_SECONDS = 10.0


class Background:
    """Work that has begun; `interrupt` ends its waits for other processes.

    A program may end without waiting for it.
    """

    def __init__(self, work: Callable[[], None], name: str, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        # How it ended; if somebody has given it up before, that comes first.
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = Thread(target=self._run, args=(work,), name=name, daemon=True)
        # A thread that comes back from native code after Python has ended takes the process down.
        atexit.register(self.end)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._outcomes.put(error)
        else:
            self._outcomes.put(None)
        finally:
            atexit.unregister(self.end)

    def wait(self) -> None:
        """Wait for the end, once, and raise what went wrong."""
        outcome = self._outcomes.get()
        if outcome is not None:
            raise outcome

    def give_up(self) -> None:
        """Let whoever waits wait no longer; any thread may call this."""
        self._outcomes.put(LinkLostError("it was given up, for another rank is lost"))

    def end(self) -> None:
        """Wait for the end, whatever it is, but not for long."""
        self._thread.join(_GRACE_SECONDS)
        if self._thread.is_alive():
            self._interrupt()
            self._thread.join(_GRACE_SECONDS)
