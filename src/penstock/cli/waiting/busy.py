"""What is running, shown in a terminal once it has taken a while."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Timer

from rich.console import Console

__all__ = ["busy", "show_busy"]


@contextmanager
def show_busy(console: Console, text: str, *, patience: float = 1.0) -> Iterator[None]:
    """Show in a terminal what is running, once it has taken `patience` seconds."""
    if not console.is_terminal:
        yield
        return
    status = console.status(text)
    timer = Timer(patience, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def busy(text: str) -> AbstractContextManager[None]:
    """Show what is running where the output of a command does not go."""
    return show_busy(Console(stderr=True), text)
