"""A projection: the step of a model on a cluster, and where its seconds go."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.planner.plans import Plan
from penstock.planner.projection.layout import Degrees
from penstock.planner.search.breakdown import break_down
from penstock.sim.throughput import Throughput, Workload
from penstock.units import format_bytes, format_share

__all__ = ["Projection", "projection_table"]


@dataclass(frozen=True)
class Projection:
    """A plan for one pipeline of a cluster, and what a step costs beyond it.

    `sizes` is how many layers each stage has. `collective_seconds` is what tensor parallelism adds
    to a microbatch on an average rank, `reduction_seconds` what each rank needs after its last
    action to reduce its gradients over replicas; both without what compute hides.
    """

    degrees: Degrees
    plan: Plan
    sizes: tuple[int, ...]
    collective_seconds: float
    reduction_seconds: tuple[float, ...]
    optimizer_seconds: float
    workload: Workload

    @cached_property
    def seconds(self) -> float:
        """The seconds of a step, until the last rank has reduced and run its optimizer."""
        return self._end_of_reductions + self.optimizer_seconds

    @cached_property
    def _end_of_reductions(self) -> float:
        timeline = self.plan.timeline
        rows = timeline.schedule.rows
        ends = np.maximum.reduceat(timeline.end, rows.first[:-1])
        begin = float(timeline.start[rows.is_compute].min())
        return float((ends + np.array(self.reduction_seconds)).max()) - begin

    @property
    def throughput(self) -> Throughput:
        """Tokens per second of the cluster, FLOP/s of a device, and MFU."""
        problem = self.plan.problem
        return self.workload.at(
            self.seconds, ranks=problem.ranks, microbatches=problem.microbatches
        )

    @property
    def by_cause(self) -> dict[str, float]:
        """Where the seconds of a step go; they add up to it."""
        found = break_down(self.plan).by_cause
        collectives = self.collective_seconds * self.plan.problem.microbatches
        return {
            "work": found["work"] - collectives,
            "tensor collectives": collectives,
            "imbalance": found["imbalance"],
            "transfer": found["transfer"],
            "bubble": found["bubble"],
            "reduction": self._end_of_reductions - self.plan.timeline.end_time,
            "optimizer": self.optimizer_seconds,
        }

    def __repr__(self) -> str:
        return f"<Projection {self.degrees}: {self.seconds:.4g} s per step>"

    def __str__(self) -> str:
        problem, timeline = self.plan.problem, self.plan.timeline
        lines = [
            f"{self.degrees}: {problem.stages} stages, {problem.microbatches} microbatches, "
            f"{self.plan.schedule.name}",
            f"step {self.seconds:.4g} s",
        ]
        if self.workload.tokens_per_microbatch:
            lines.append(str(self.throughput))
        if timeline.peak_bytes:
            lines.append(f"the fullest device holds {format_bytes(timeline.peak_bytes)}")
        lines += [
            f"  {cause}: {seconds:.4g} s ({format_share(seconds / self.seconds)})"
            for cause, seconds in self.by_cause.items()
            if abs(seconds) > 1e-9 * self.seconds
        ]
        return "\n".join(lines)


def projection_table(found: Sequence[Projection]) -> str:
    """Return projections as a table of text, in their order."""
    headings = (
        "tensor",
        "pipeline",
        "data",
        "step s",
        "ratio",
        "tokens/s",
        "MFU",
        "bubble",
        "peak",
    )
    rows = [headings, *(_cells(one, found[0].seconds) for one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def _cells(one: Projection, best: float) -> tuple[str, ...]:
    degrees, rate = one.degrees, one.throughput
    return (
        str(degrees.tensor),
        str(degrees.pipeline),
        str(degrees.data),
        f"{one.seconds:.4g}",
        f"{one.seconds / best:.3f}",
        f"{rate.tokens_per_second:,.0f}",
        "" if rate.mfu is None else format_share(rate.mfu),
        format_share(one.plan.step.bubble_rate),
        format_bytes(one.plan.timeline.peak_bytes),
    )
