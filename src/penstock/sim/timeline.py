"""Timelines: the actions of a schedule with start, end and memory, per rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.actions import Action, Kind
from penstock.ir.graph import build_graph
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.sim.period import (
    DEFAULT_BOUNDARY,
    Boundary,
    Period,
    read_optimizer_seconds,
    require_boundary,
)
from penstock.sim.program import COLLECTIVE_KINDS, Program
from penstock.sim.repeated import Repeated, recorded_prices
from penstock.units import format_share

__all__ = ["Span", "Timeline"]


@dataclass(frozen=True, slots=True)
class Span:
    """One action with its rank, its seconds and the bytes its rank holds because of it.

    `bytes` counts from the start of a forward and from the end of anything else.
    """

    rank: int
    action: Action
    start: float
    end: float
    bytes: float
    is_overlapped: bool


@dataclass(frozen=True, eq=False)
class Timeline:
    """The rows of a schedule with their start and end in seconds and their rank's bytes.

    It is simulated, with the program that gave its times, or recorded, without.
    """

    schedule: Schedule
    start: Floats
    end: Floats
    memory: Floats
    program: Program | None = None

    def __post_init__(self) -> None:
        stages, named = self.schedule.num_stages, int(self.schedule.rows.stage.max())
        if named >= stages:
            raise ScheduleError(
                f"stage {named} is named, but only the stages below {stages} compute; "
                "a timeline must hold compute of every stage"
            )

    def __repr__(self) -> str:
        schedule = self.schedule
        return (
            f"<Timeline of {schedule.name}: {schedule.num_ranks} ranks, {len(schedule.rows)} "
            f"actions, end time {self.end_time:.4g} s, bubble {format_share(self.bubble_rate)}>"
        )

    @cached_property
    def end_time(self) -> float:
        """When the last action of all ends, counted from the start of the first of all."""
        first, last = self._bounds()
        begin = float(first.min())
        if self.program is not None:
            # Gathering may come before all compute.
            is_timed = self.schedule.rows.is_kind(*COLLECTIVE_KINDS) & (self.end > self.start)
            begin = float(self.start[is_timed].min(initial=begin))
        return float(last.max()) - begin

    @cached_property
    def rank_spans(self) -> tuple[float, ...]:
        """Per rank, the seconds from the start of its first action to the end of its last."""
        first, last = self._bounds()
        return tuple((last - first).tolist())

    @property
    def longest_span(self) -> float:
        """The longest time of any rank from its first action to its last: the papers' number."""
        return max(self.rank_spans)

    def period(
        self,
        boundary: Boundary = DEFAULT_BOUNDARY,
        *,
        optimizer_seconds: float | Sequence[float] = 0.0,
    ) -> float:
        """Return the seconds per step of many in a row, given what ranks wait for in between.

        See `penstock.sim.period` for the boundaries. `optimizer_seconds` are those of each rank
        between its last action and the next step. They count unless papers' numbers are asked for.
        """
        require_boundary(boundary)
        after = read_optimizer_seconds(optimizer_seconds, self.schedule.num_ranks)
        match boundary:
            case "everything":
                return self.end_time + float(after.max())
            case "gradients":
                ends = self._repeated().ends(after)
                return float(ends.max())
            case "nothing":
                return self._repeated(after).period()
            case _:
                return self.longest_span

    def repeat(self, boundary: Boundary = DEFAULT_BOUNDARY) -> Period:
        """Return the period with the idle time of every rank in it."""
        return Period(boundary, self.period(boundary), self.busy_seconds)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Per rank, the seconds spent computing and sending; an overlap counts once."""
        rows, length = self.schedule.rows, self.end - self.start
        is_receive = rows.is_kind(Kind.RECV_F, Kind.RECV_B)
        host: Floats | float = 0.0
        if self.program is not None:
            occupied, size = self.program.prices.busy, len(rows)
            host = self.program.prices.host[:size]
            length = np.where(self.program.is_beside, occupied[:size], length)
        length = np.where(rows.joined, 0, np.where(is_receive, host, length))
        total = np.concatenate(([0.0], np.cumsum(length)))
        return tuple(np.diff(total[rows.first]).tolist())

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Per rank, the seconds in which it is idle until the last rank ends."""
        return self.repeat().idle_seconds

    @property
    def rank_bubble_rates(self) -> tuple[float, ...]:
        """Per rank, the share of the end time in which it is idle."""
        return self.repeat().rank_bubble_rates

    @property
    def bubble_rate(self) -> float:
        """The share of the end time in which ranks are idle, over all ranks."""
        return self.repeat().bubble_rate

    @property
    def papers_bubble_rate(self) -> float:
        """The share of the longest span in which its rank is idle, as papers count."""
        slowest = self.rank_spans.index(self.longest_span)
        return self.repeat("papers").rank_bubble_rates[slowest]

    @cached_property
    def held_activations(self) -> NDArray[np.int64]:
        """Per row, the stage activations that its rank then holds, each from its F to its B or W.

        Like bytes, they count from the start of a forward and from the end of anything else.
        """
        rows = self.schedule.rows
        total = np.cumsum(rows.held_change)
        before = np.concatenate(([0], total))[rows.first[:-1]]
        held: NDArray[np.int64] = total - np.repeat(before, np.diff(rows.first))
        return held

    @cached_property
    def rank_peak_activations(self) -> tuple[int, ...]:
        """Per rank, the most stage activations held at once."""
        bounds = self.schedule.rows.first[:-1]
        return tuple(np.maximum.reduceat(self.held_activations, bounds).tolist())

    @property
    def peak_activations(self) -> int:
        """The most stage activations that any rank holds at once."""
        return max(self.rank_peak_activations)

    @property
    def peak_microbatches(self) -> float:
        """The peak in the unit of the papers: whole microbatches over one rank's equal share.

        With two stages per rank, two stage activations make one; a copied part counts in full.
        """
        num_parts = self.schedule.dataflow.num_parts
        return self.peak_activations * self.schedule.num_ranks / num_parts

    @cached_property
    def rank_peak_bytes(self) -> tuple[float, ...]:
        """Per rank, the most bytes held at once."""
        return tuple(np.maximum.reduceat(self.memory, self.schedule.rows.first[:-1]).tolist())

    @property
    def peak_bytes(self) -> float:
        """The most bytes that any rank holds at once."""
        return max(self.rank_peak_bytes)

    def spans(self, rank: int) -> Iterator[Span]:
        """Return one rank's actions with their times, in order."""
        return map(self.span, self.schedule.rows.of_rank(rank))

    def span(self, row: int) -> Span:
        """Return the action in one row of the schedule with its times."""
        rows = self.schedule.rows
        times = float(self.start[row]), float(self.end[row]), float(self.memory[row])
        is_overlapped = bool(rows.joined[row : row + 2].any())
        return Span(rows.rank(row), rows.action(row), *times, is_overlapped)

    def _repeated(self, after: NDArray[np.float64] | float = 0.0) -> Repeated:
        """Return the step with these seconds after the end of every rank."""
        program = self.program
        if program is None:
            prices = recorded_prices(self.schedule, self.start, self.end)
            program = Program.of_rows(self.schedule, build_graph(self.schedule), prices)
        return Repeated(program, np.broadcast_to(np.float64(after), self.schedule.num_ranks))

    def _bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return, per rank, when its first compute action starts and its last action ends."""
        bounds = self.schedule.rows.first[:-1]
        is_compute = self.schedule.rows.is_compute
        first = np.minimum.reduceat(np.where(is_compute, self.start, np.inf), bounds)
        return first, np.maximum.reduceat(self.end, bounds)
