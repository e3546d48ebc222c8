"""How long a pipeline waits before it gives up a rank, and where it keeps its flight records."""

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ArgumentError

__all__ = ["DEFAULT_TIMEOUTS", "Timeouts", "patience_seconds"]

# Shorter silences are ordinary: the threads of a busy machine pause for tenths of a second.
_SHORTEST_SILENCE = 1.0
# What is left of the limit once a rank is silent: half of it to look, and half for the news to
# reach all others. A share, and at most this many seconds.
_NEWS_SHARE, _MOST_NEWS_SECONDS = 1 / 4, 1.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """When ranks are given up.

    A rank that has not answered for `silence_seconds` is lost. After a loss the others have
    `stop_seconds` to leave what they are doing; a process that does not is ended. A step in which
    no rank made progress for `stall_seconds` is reported in the log and continues. A rank that
    has not come to build its pipeline `join_seconds` after another is lost. Any of these may be
    infinite, which a debugger needs. Flight records are kept in a new folder inside `folder`, or
    inside the system's folder for temporary files.

    >>> Timeouts(silence_seconds=60).stop_seconds
    10.0
    """

    silence_seconds: float = 30.0
    stop_seconds: float = 10.0
    stall_seconds: float = 120.0
    join_seconds: float = 300.0
    folder: Path | str | None = None

    def __post_init__(self) -> None:
        for name in ("silence_seconds", "stop_seconds", "stall_seconds", "join_seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise ArgumentError(f"{name} must be a positive number of seconds (got {value})")
        if self.silence_seconds < _SHORTEST_SILENCE:
            raise ArgumentError(
                f"silence_seconds must be at least {_SHORTEST_SILENCE}, since a busy rank may "
                f"be silent too (got {self.silence_seconds}); use a larger value"
            )


def patience_seconds(timeouts: Timeouts) -> float:
    """Return how long a rank waits for a neighbour, so that all others know of it in time.

    >>> patience_seconds(Timeouts(silence_seconds=30)), patience_seconds(Timeouts(2))
    (29.0, 1.5)
    """
    limit = timeouts.silence_seconds
    return limit - min(_MOST_NEWS_SECONDS, limit * _NEWS_SHARE)


DEFAULT_TIMEOUTS = Timeouts()
