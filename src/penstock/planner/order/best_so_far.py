"""The best schedule so far, against the clock and the bound."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from penstock.errors import MemoryLimitError
from penstock.ir.schedule import Schedule
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate

__all__ = ["Progress", "Race", "is_as_fast"]

# A schedule keeps a limit, and is as fast as the bound, if it is above it by no more than this
# part of it.
_ROUNDING = 1e-9

# Nobody reads progress more often than that.
_SECONDS_BETWEEN_REPORTS = 0.05


@dataclass(frozen=True, slots=True)
class Progress:
    """How far solving has come: seconds gone, the best makespan so far, and what is tried."""

    seconds: float
    makespan: float
    lower_bound: float
    trying: str


@dataclass(slots=True)
class Race:
    """Takes schedules and keeps the fastest that keeps the limit."""

    problem: SchedulingProblem
    bound: float
    seconds: float
    progress: Callable[[Progress], None] | None
    makespan: float = inf
    _best: Schedule | None = None
    _begin: float = field(default_factory=perf_counter)
    _reported: float = -inf

    @property
    def has_best(self) -> bool:
        """Whether any schedule was offered that keeps the limit."""
        return self._best is not None

    @property
    def best(self) -> Schedule:
        """The fastest so far."""
        if self._best is None:
            raise MemoryLimitError(
                "no schedule was found that keeps the limit of bytes; make the problem with "
                "Problem.of, which says what would do"
            )
        return self._best

    @property
    def gone(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self._begin

    @property
    def is_won(self) -> bool:
        """Whether nothing can be faster than the best so far."""
        return is_as_fast(self.makespan, self.bound)

    def offer(self, schedule: Schedule, trying: str) -> None:
        """Take a schedule if it keeps the limit and is no slower than the best."""
        timeline = simulate(schedule, self.problem.costs)
        pairs = zip(timeline.rank_peak_bytes, self.problem.memory, strict=True)
        fits = all(peak <= limit * (1 + _ROUNDING) for peak, limit in pairs)
        if fits and timeline.makespan < self.makespan:
            self._best, self.makespan = schedule, timeline.makespan
        self.report(trying)

    def report(self, trying: str, makespan: float = inf) -> None:
        """Tell what is being tried, and the best so far, unless that was told just now.

        `makespan` is that of the best order that is not offered yet.
        """
        gone, best = self.gone, min(makespan, self.makespan)
        is_due = gone - self._reported >= _SECONDS_BETWEEN_REPORTS
        if self.progress is not None and best < inf and is_due:
            self._reported = gone
            self.progress(Progress(gone, best, self.bound, trying))


def is_as_fast(makespan: float, bound: float) -> bool:
    """Whether a schedule that takes so long is as fast as its bound, but for rounding."""
    return makespan <= bound * (1 + _ROUNDING)
