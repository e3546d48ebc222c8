"""A problem as a constraint model: an interval per action, one at a time on every rank.

`add_order` makes microbatches of equal size keep their order in each stage and kind. That loses
nothing if nothing is recomputed or offloaded: in any schedule, give the j-th start of a stage and
kind to microbatch j. The j-th of what needs an input starts no earlier than the j-th input is
there, so all is well with the same times and bytes. Microbatches of different size are free to
overtake one another. Collectives and shared wires are
left out, which makes nothing slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.exact.ticks import Ticks, find_limits
from penstock.planner.problem import SchedulingProblem

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntervalVar, IntVar, LinearExprT

__all__ = ["Actions", "Interval", "ScheduleModel", "add_order", "make_model"]


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """One action of the model: when it starts and ends, and the interval between."""

    start: IntVar
    end: LinearExprT
    interval: IntervalVar


# One tuple per stage, one piece per microbatch.
Actions = tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleModel:
    """The step to make short, and F, I and W of every stage and microbatch.

    `is_merged` says per microbatch whether I and W are one piece, B: I then takes as long as B,
    and W nothing. Only stages where that can be better than I and W in a row are in it.
    """

    model: CpModel
    problem: SchedulingProblem
    ticks: Ticks
    horizon: int
    step: IntVar
    forward: Actions
    backward: Actions
    weight: Actions
    is_merged: dict[int, tuple[IntVar, ...]]

    def to_bound(self, ticks: float) -> float:
        """Return the seconds that a bound in ticks proves, those around compute included."""
        rounded = 0 if self.problem.lasts_until_all_end else 1
        return (ticks - rounded) * self.ticks.seconds + self.problem.around


def make_model(
    model: CpModel, problem: SchedulingProblem, *, least: float, most: float
) -> ScheduleModel:
    """Fill an empty model with a problem whose best step lies between `least` and `most`."""
    ticks = Ticks.for_step(most)
    # Every rank starts within the span of the first rank, and then has one of its own.
    horizon = 2 * ticks.most(most)
    draft = _Draft(model, problem, ticks, horizon)
    is_merged = draft.choices()
    filled = ScheduleModel(
        model,
        problem,
        ticks,
        horizon,
        model.new_int_var(ticks.least(least), ticks.most(most), "step"),
        tuple(draft.fixed(seconds) for seconds in problem.forward_each),
        draft.backwards(is_merged),
        draft.weights(is_merged),
        is_merged,
    )
    _add_needs(filled)
    _add_ranks(filled)
    _add_limits(filled)
    return filled


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """Makes the variables of a model."""

    model: CpModel
    problem: SchedulingProblem
    ticks: Ticks
    horizon: int

    def choices(self) -> dict[int, tuple[IntVar, ...]]:
        """Return the stages where B can beat I and W in a row: it is shorter, or holds less."""
        full = self.problem.full_backward_each
        split = self.problem.backward_input_each + self.problem.backward_weight_each
        is_bounded = np.isfinite(self.problem.capacity)[list(self.problem.placement.rank_of_stage)]
        can_pay = (full < split).any(axis=1) | (
            is_bounded & (self.problem.stash > self.problem.activation)
        )
        return {
            stage: tuple(self.model.new_bool_var("") for _ in range(self.problem.microbatches))
            for stage in np.flatnonzero(can_pay).tolist()
        }

    def backwards(self, is_merged: dict[int, tuple[IntVar, ...]]) -> Actions:
        """Return I of every stage, as long as B where it is merged."""
        full = self.problem.full_backward_each
        return tuple(
            self.chosen(seconds, full[stage], is_merged[stage])
            if stage in is_merged
            else self.fixed(seconds)
            for stage, seconds in enumerate(self.problem.backward_input_each)
        )

    def weights(self, is_merged: dict[int, tuple[IntVar, ...]]) -> Actions:
        """Return W of every stage, of length 0 where it is merged."""
        return tuple(
            self.chosen(seconds, 0 * seconds, is_merged[stage])
            if stage in is_merged
            else self.fixed(seconds)
            for stage, seconds in enumerate(self.problem.backward_weight_each)
        )

    def fixed(self, seconds: Floats) -> tuple[Interval, ...]:
        """Return a stage's actions of these lengths."""
        lengths = [self.ticks.down(each) for each in seconds]
        make = self.model.new_fixed_size_interval_var
        pairs = [(self._time(), length) for length in lengths]
        return tuple(Interval(start, start + size, make(start, size, "")) for start, size in pairs)

    def chosen(
        self, seconds: Floats, merged: Floats, choice: tuple[IntVar, ...]
    ) -> tuple[Interval, ...]:
        """Return a stage's actions of these lengths, or of others where they are merged."""
        pieces = []
        for is_merged, one, whole in zip(choice, seconds, merged, strict=True):
            length, other = self.ticks.down(one), self.ticks.down(whole)
            start, end = self._time(), self._time()
            size = length + (other - length) * is_merged
            pieces.append(Interval(start, end, self.model.new_interval_var(start, size, end, "")))
        return tuple(pieces)

    def _time(self) -> IntVar:
        return self.model.new_int_var(0, self.horizon, "")


def _add_needs(filled: ScheduleModel) -> None:
    """Make every action start after its inputs are there."""
    model, problem, ticks = filled.model, filled.problem, filled.ticks
    for stage in range(problem.stages):
        columns = (filled.forward[stage], filled.backward[stage], filled.weight[stage])
        for forward, backward, weight in zip(*columns, strict=True):
            model.add(backward.start >= forward.end)
            model.add(weight.start >= backward.end)
    for stage, (down, up) in enumerate(zip(*problem.lags_of_size_one, strict=True)):
        scales = problem.scales.tolist()
        forwards = zip(filled.forward[stage], filled.forward[stage + 1], scales, strict=True)
        for here, there, scale in forwards:
            model.add(there.start >= here.end + ticks.down(down * scale))
        backwards = zip(filled.backward[stage], filled.backward[stage + 1], scales, strict=True)
        for here, there, scale in backwards:
            model.add(here.start >= there.end + ticks.down(up * scale))
    for stage, choices in filled.is_merged.items():
        pairs = zip(filled.backward[stage], filled.weight[stage], choices, strict=True)
        for backward, weight, choice in pairs:
            model.add(weight.start == backward.end).only_enforce_if(choice)


def _add_ranks(filled: ScheduleModel) -> None:
    """Make every rank do one thing at a time, from its first F to its last W."""
    model, problem = filled.model, filled.problem
    arrival = np.concatenate(([0.0], np.cumsum(problem.forward[:-1] + problem.lag_down)))
    for rank in range(problem.ranks):
        stages = problem.placement.stages(rank)
        kinds = (filled.forward, filled.backward, filled.weight)
        model.add_no_overlap(
            piece.interval for stage in stages for kind in kinds for piece in kind[stage]
        )
        latest = _add_start(filled, stages[0], arrival)
        for stage in stages:
            for piece in filled.weight[stage]:
                model.add(piece.end <= filled.step + latest)


def _add_start(filled: ScheduleModel, stage: int, arrival: Floats) -> IntVar | int:
    """Return the second from which a rank's step counts, given its first stage."""
    model, problem = filled.model, filled.problem
    if problem.lasts_until_all_end:
        return 0
    if not problem.is_even:
        # Any microbatch may be first; that a rank may begin late only makes a bound lower.
        begin = model.new_int_var(0, 0 if stage == 0 else filled.horizon, "")
        model.add_min_equality(begin, [piece.start for piece in filled.forward[stage]])
        return begin
    first = filled.forward[stage][0].start
    if problem.boundary == "nothing":
        if stage == 0:
            # Everything waits for the first F, so time may as well begin with it.
            model.add(first == 0)
        return first
    if len({problem.placement.rank_of_stage[s] for s in range(stage)}) < stage:
        return first
    # No rank before it has two stages on the way, so nothing can delay its first F.
    latest = filled.ticks.most(arrival[stage])
    model.add(first <= latest)
    return latest


def add_order(filled: ScheduleModel) -> None:
    """Keep even microbatches in order, except for W of stages where some are merged."""
    for kind in (filled.forward, filled.backward, filled.weight):
        for stage, pieces in enumerate(kind):
            if kind is filled.weight and stage in filled.is_merged:
                continue
            for one, other in pairwise(pieces):
                filled.model.add(other.start >= one.end)
    _add_turnaround(filled)


def _add_turnaround(filled: ScheduleModel) -> None:
    """Start I right after F on a rank that holds only the last stage.

    Nothing but that I needs this F. Whatever is between the two, another F or a W, can come after
    them: I is earlier, the other no later than I was, and no more bytes are held.
    """
    problem, last = filled.problem, filled.problem.stages - 1
    stages = problem.placement.stages(problem.placement.rank_of_stage[last])
    if stages != (last,) or problem.stash[last] > problem.activation[last]:
        return
    for forward, backward in zip(filled.forward[last], filled.backward[last], strict=True):
        filled.model.add(backward.start == forward.end)


def _add_limits(filled: ScheduleModel) -> None:
    """Add the bounds on single actions: their earliest starts, and what follows them."""
    model, ticks = filled.model, filled.ticks
    limits = find_limits(filled.problem)
    tables = (
        (filled.forward, limits.forward_start, limits.after_forward),
        (filled.backward, limits.backward_start, limits.after_backward),
    )
    for actions, earliest, after in tables:
        for pieces, times, tails in zip(actions, earliest, after, strict=True):
            for piece, time, tail in zip(pieces, times, tails, strict=True):
                model.add(piece.start >= max(0, ticks.least(time)))
                model.add(filled.step >= piece.start + ticks.least(tail))
