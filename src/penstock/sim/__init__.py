"""Simulation: from a schedule and costs to a timeline, and what explains its length."""

from typing import TYPE_CHECKING

from penstock.late_names import late_names
from penstock.sim.engine import simulate
from penstock.sim.explain import Explanation, Gap, Saving, explain
from penstock.sim.period import Boundary, Period
from penstock.sim.timeline import Span, Timeline

if TYPE_CHECKING:
    from penstock.sim.recorded.costs_of_timeline import costs_of
    from penstock.sim.recorded.difference import Difference, find_difference
    from penstock.sim.recorded.review import Pair, Review, Tally, review
    from penstock.sim.recorded.slowdowns import Slowdown, find_slowdowns
    from penstock.sim.throughput import Throughput, Workload

__all__ = [
    "Boundary",
    "Difference",
    "Explanation",
    "Gap",
    "Pair",
    "Period",
    "Review",
    "Saving",
    "Slowdown",
    "Span",
    "Tally",
    "Throughput",
    "Timeline",
    "Workload",
    "costs_of",
    "explain",
    "find_difference",
    "find_slowdowns",
    "review",
    "simulate",
]

# Who only simulates needs nothing of recorded steps.
_HOMES = {
    "Difference": "recorded.difference",
    "Pair": "recorded.review",
    "Review": "recorded.review",
    "Slowdown": "recorded.slowdowns",
    "Tally": "recorded.review",
    "Throughput": "throughput",
    "Workload": "throughput",
    "costs_of": "recorded.costs_of_timeline",
    "find_difference": "recorded.difference",
    "find_slowdowns": "recorded.slowdowns",
    "review": "recorded.review",
}

__getattr__, __dir__ = late_names(__name__, _HOMES)
