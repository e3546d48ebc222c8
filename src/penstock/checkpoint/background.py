"""Work in a thread beside the training, which can be waited for or abandoned."""

import atexit
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from penstock.ranks.faults import LinkLostError

__all__ = ["Background"]


# How long work may still take when the program fails or ends.
_GRACE_SECONDS = 10.0


class Background:
    """Work that has started; `interrupt` ends its waits for other processes.

    A program may end without waiting for it.
    """

    def __init__(self, work: Callable[[], None], name: str, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        # How it ended; if it was abandoned before, that comes first.
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = Thread(target=self._run, args=(work,), name=name, daemon=True)
        # A thread that returns from native code after Python has ended crashes the process.
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
        """Wait for the end, once, and raise the error if there was one."""
        outcome = self._outcomes.get()
        if outcome is not None:
            raise outcome

    def abandon(self) -> None:
        """End `wait` with an error; any thread may call this."""
        self._outcomes.put(LinkLostError("it was abandoned because another rank is lost"))

    def end(self) -> None:
        """Wait for the end for a short time, and interrupt the work if that is not enough."""
        self._thread.join(_GRACE_SECONDS)
        if self._thread.is_alive():
            self._interrupt()
            self._thread.join(_GRACE_SECONDS)
