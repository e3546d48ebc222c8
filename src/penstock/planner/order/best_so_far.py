"""The best schedule so far, with the clock and the bound of a search."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from penstock.errors import MemoryLimitError
from penstock.ir.schedule import Schedule
from penstock.planner.effort_clock import EffortClock
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate

__all__ = ["BestSoFar", "Progress", "meets_bound"]

# A schedule keeps a limit, or meets the bound, if it exceeds it by at most this share.
_ROUNDING = 1e-9

# Progress is reported no more often than this.
_SECONDS_BETWEEN_REPORTS = 0.05


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a search: seconds elapsed, the best step so far, and what is tried."""

    seconds: float
    step: float
    lower_bound: float
    trying: str


@dataclass(slots=True)
class BestSoFar:
    """The fastest schedule so far that keeps the memory limit, with the state of the search.

    The clock does not end the search before the work of `floor` rows is done. `is_cut_short` says
    that it ended some part before its work was done.
    """

    problem: SchedulingProblem
    bound: float
    progress: Callable[[Progress], None] | None
    floor: float = 0.0
    step: float = inf
    _best: Schedule | None = None
    is_cut_short: bool = False
    _clock: EffortClock = field(default_factory=EffortClock)
    _reported: float = -inf

    @property
    def has_best(self) -> bool:
        """Whether any offered schedule keeps the limit."""
        return self._best is not None

    @property
    def best(self) -> Schedule:
        """The fastest schedule so far."""
        if self._best is None:
            raise MemoryLimitError(
                "no schedule was found that keeps the memory limit; make the problem with "
                "SchedulingProblem.of, which says what limit would do"
            )
        return self._best

    @property
    def elapsed(self) -> float:
        """Processor seconds since the start."""
        return self._clock.seconds

    def is_over(self, seconds: float, rows: float) -> bool:
        """Return whether the clock is past these seconds, and the floor below the next rows."""
        is_over = self.floor < rows and self.elapsed >= seconds
        self.floor -= rows
        self.is_cut_short |= is_over
        return is_over

    @property
    def is_optimal(self) -> bool:
        """Whether no schedule can be faster than the best so far."""
        return meets_bound(self.step, self.bound)

    def offer(self, schedule: Schedule, trying: str) -> None:
        """Take a schedule if it keeps the limit and is faster than the best."""
        timeline = simulate(schedule, self.problem.costs)
        pairs = zip(timeline.rank_peak_bytes, self.problem.memory, strict=True)
        fits = all(peak <= limit * (1 + _ROUNDING) for peak, limit in pairs)
        if fits and (step := timeline.period(self.problem.boundary)) < self.step:
            self._best, self.step = schedule, step
        self.report(trying)

    def report(self, trying: str, step: float = inf) -> None:
        """Report what is being tried and the best so far, unless a report was made just now.

        `step` is that of the best order that is not offered yet.
        """
        elapsed, best = self.elapsed, min(step, self.step)
        is_due = elapsed - self._reported >= _SECONDS_BETWEEN_REPORTS
        if self.progress is not None and best < inf and is_due:
            self._reported = elapsed
            self.progress(Progress(elapsed, best, self.bound, trying))


def meets_bound(seconds: float, bound: float) -> bool:
    """Return whether the seconds of a step meet the bound, up to rounding."""
    return seconds <= bound * (1 + _ROUNDING)
