"""Plans for growing memory limits, each with the seconds that no order beats."""

from dataclasses import dataclass

from penstock.planner.plans import Plan
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary, name_seconds
from penstock.units import format_bytes, format_share

__all__ = ["CurvePoint", "MemoryCurve"]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A limit in bytes per rank, the best plan that keeps it, and seconds that none can beat."""

    memory: float
    plan: Plan
    lower_bound: float

    @property
    def seconds(self) -> float:
        """What a step of the plan costs."""
        return self.plan.seconds


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Points with growing limits: what a step costs, and what it costs at least."""

    points: tuple[CurvePoint, ...]
    boundary: Boundary = DEFAULT_BOUNDARY

    def __repr__(self) -> str:
        limits = ", ".join(f"{point.memory:.4g}" for point in self.points)
        return f"<MemoryCurve: limits of {limits} bytes>"

    def __str__(self) -> str:
        rows = [
            ("memory", f"{name_seconds(self.boundary)} s", "bound s", "gap", "bubble", "order")
        ]
        for point in self.points:
            gap = point.seconds / point.lower_bound - 1 if point.lower_bound else 0.0
            rows.append(
                (
                    format_bytes(point.memory),
                    f"{point.seconds:.4g}",
                    f"{point.lower_bound:.4g}",
                    format_share(abs(gap)),
                    format_share(point.plan.step.bubble_rate),
                    point.plan.schedule.name,
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.rjust, row[:-1], widths)) + f"  {row[-1]}" for row in rows)
        return "\n".join(line.rstrip() for line in lines)
