"""Simulation: from a schedule and costs to a timeline, and what explains its length."""

from penstock.sim.engine import simulate
from penstock.sim.explain import Explanation, Gap, Saving, explain
from penstock.sim.period import Boundary, Period
from penstock.sim.recorded.costs_of_timeline import costs_of
from penstock.sim.recorded.difference import Difference, find_difference
from penstock.sim.recorded.review import Pair, Review, Tally, review
from penstock.sim.recorded.slowdowns import Slowdown, find_slowdowns
from penstock.sim.throughput import Throughput, Workload
from penstock.sim.timeline import Span, Timeline

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
