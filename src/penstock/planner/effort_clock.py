"""The clock of a search: seconds of work, so that a busy machine does not end it early."""

from dataclasses import dataclass, field
from time import perf_counter, thread_time

__all__ = ["EffortClock"]

# A search that gets less than this share of a processor core ends late rather than never.
_LEAST_SHARE = 1 / 6


@dataclass(frozen=True, slots=True)
class EffortClock:
    """Counts the processor seconds of this thread from when it was made.

    If other processes leave it too little of a core, a sixth of the real seconds counts instead.
    """

    _work: float = field(default_factory=thread_time)
    _real: float = field(default_factory=perf_counter)

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        return max(thread_time() - self._work, _LEAST_SHARE * (perf_counter() - self._real))
