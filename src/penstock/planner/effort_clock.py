"""The effort of a search: rows of orders that are built, and the processor time that ends it.

Effort is counted in rows, which depend on the problem and on nothing else, so the same request
does the same work on a busy machine and on a quiet one. The clock counts processor seconds of
this thread: other processes make a search take longer, but never make it find less.
"""

from dataclasses import dataclass, field, replace
from time import thread_time

from penstock.errors import ArgumentError
from penstock.untrusted import quote, to_quantity

__all__ = ["Effort", "EffortClock", "require_effort", "require_seconds"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search: rows of orders to build, and the processor seconds that end it."""

    rows: float
    seconds: float

    def part(self, share: float) -> "Effort":
        """Return a share of the rows and of the seconds."""
        return replace(self, rows=share * self.rows, seconds=share * self.seconds)


@dataclass(frozen=True, slots=True)
class EffortClock:
    """Counts the processor seconds of this thread from when it was made."""

    _begin: float = field(default_factory=thread_time)

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        return thread_time() - self._begin


def require_seconds(seconds: object) -> None:
    """Raise an error unless this is how long to search."""
    if to_quantity(seconds) is None:
        raise ArgumentError(f"seconds must be a number from 0 (got {quote(seconds)})")


def require_effort(effort: object) -> None:
    """Raise an error unless this is how much to search, or None."""
    if effort is not None and to_quantity(effort) is None:
        raise ArgumentError(
            f"effort must be a number of rows from 0, such as 1e6 (got {quote(effort)}); leave it "
            "out to search for some seconds"
        )
