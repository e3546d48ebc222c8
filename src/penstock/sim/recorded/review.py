"""A predicted step compared with the same step as it was recorded."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.actions import COMPUTE_KINDS, Kind
from penstock.ir.rows import Floats, Rows
from penstock.sim.recorded.difference import Difference, find_difference
from penstock.sim.timeline import Timeline

__all__ = ["Pair", "Review", "Tally", "review"]

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class Pair:
    """The seconds of something, as predicted and as recorded."""

    predicted: float
    recorded: float

    @property
    def ratio(self) -> float:
        """The recorded seconds as a multiple of the predicted ones."""
        return _divide(self.recorded, self.predicted)

    @property
    def error(self) -> float:
        """How far the prediction is above (or below) the recorded seconds, as a share of them."""
        return _divide(self.predicted, self.recorded) - 1


@dataclass(frozen=True, slots=True)
class Tally:
    """All actions of one kind and stage: their rank, their number, and their seconds."""

    rank: int
    stage: int
    kind: Kind
    actions: int
    seconds: Pair


@dataclass(frozen=True, slots=True)
class Review:
    """A prediction beside the recording, for the step, every rank and every stage.

    `step` is the end time, `idle` the idle seconds of every rank in it, and `tallies` has the
    compute of every stage by kind. `difference` says why the step took another time.
    """

    step: Pair
    idle: tuple[Pair, ...]
    tallies: tuple[Tally, ...]
    difference: Difference

    @property
    def kinds(self) -> dict[Kind, Pair]:
        """The seconds of all actions of each kind."""
        return _add_up(self.tallies, lambda tally: tally.kind)

    @property
    def ranks(self) -> dict[int, Pair]:
        """The seconds that each rank computes."""
        return _add_up(self.tallies, lambda tally: tally.rank)

    @property
    def stages(self) -> dict[int, Pair]:
        """The seconds that each stage computes."""
        return _add_up(self.tallies, lambda tally: tally.stage)

    def __repr__(self) -> str:
        predicted, recorded = self.step.predicted, self.step.recorded
        return f"<Review: predicted {predicted:.4g} s, recorded {recorded:.4g} s>"

    def __str__(self) -> str:
        lines = [("", "predicted s", "recorded s", "ratio"), _line("step", self.step)]
        for rank, idle in enumerate(self.idle):
            lines.append(_line(f"rank {rank} compute", self.ranks[rank]))
            lines.append(_line(f"rank {rank} idle", idle))
        lines += [_line(f"all {kind.text}", pair) for kind, pair in self.kinds.items()]
        lines += [
            _line(f"stage {tally.stage} {tally.kind.text}, each", _per_action(tally))
            for tally in self.tallies
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = (
            [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])] for cells in lines
        )
        table = "\n".join("  ".join(row).rstrip() for row in rows)
        return f"{table}\n\n{self.difference}"


def review(predicted: Timeline, recorded: Timeline) -> Review:
    """Compare a predicted step with the recorded one, by kind of action, rank and stage.

    Both must run the same compute in the same order; only one of them need have communication.
    Sends that a prediction prices but does not list count with the work that they follow. The
    seconds of the host around compute count as idle, since in a recording they are the gaps
    between actions.

    >>> from penstock.assembly import build
    >>> from penstock.costs import Costs
    >>> from penstock.sim.engine import simulate
    >>> schedule = build("1F1B", ranks=2, microbatches=2)
    >>> found = review(simulate(schedule), simulate(schedule, Costs(forward=[1, 2])))
    >>> found.step
    Pair(predicted=9.0, recorded=11.0)
    >>> found.ranks[1].ratio
    1.3333333333333333
    """
    rows, theirs = (_compute_of(timeline) for timeline in (predicted, recorded))
    _check_order(rows, theirs)
    seconds = [_compute_seconds(timeline) for timeline in (predicted, recorded)]
    holder = predicted.schedule.placement.rank_of_stage
    tallies = []
    for stage, rank in enumerate(holder):
        for kind in COMPUTE_KINDS:
            wanted = (rows.stage == stage) & (rows.kind == kind)
            if wanted.any():
                pair = Pair(*(float(column[wanted].sum()) for column in seconds))
                tallies.append(Tally(rank, stage, kind, int(wanted.sum()), pair))
    return Review(
        Pair(predicted.end_time, recorded.end_time),
        tuple(map(Pair, _idle_seconds(predicted), _idle_seconds(recorded))),
        tuple(tallies),
        find_difference(predicted, recorded),
    )


def _idle_seconds(timeline: Timeline) -> list[float]:
    """Return, per rank, its idle seconds until the last rank ends; rounding errors count as 0."""
    least, rows = 1e-9 * timeline.end_time, timeline.schedule.rows
    host = np.where(rows.is_compute & ~rows.joined, _host_seconds(timeline), 0.0)
    gaps = np.add.reduceat(host, rows.first[:-1]).tolist()
    found = (idle + gap for idle, gap in zip(timeline.idle_seconds, gaps, strict=True))
    return [idle if idle > least else 0.0 for idle in found]


def _host_seconds(timeline: Timeline) -> Floats:
    """Return the seconds of the host within each row, which only predicted rows have."""
    size = len(timeline.schedule.rows)
    return np.zeros(size) if timeline.program is None else timeline.program.prices.host[:size]


def _compute_of(timeline: Timeline) -> Rows:
    rows = timeline.schedule.rows
    return rows.keep(rows.is_compute)


def _compute_seconds(timeline: Timeline) -> Floats:
    """Return the seconds of each compute action; members of an overlap share its time evenly."""
    rows = timeline.schedule.rows
    opens = np.flatnonzero(~rows.joined)
    size = np.diff(np.append(opens, len(rows)))
    begin = np.minimum.reduceat(timeline.start, opens)
    length = np.maximum.reduceat(timeline.end, opens) - begin - _host_seconds(timeline)[opens]
    seconds: Floats = np.repeat(length / size, size)[rows.is_compute]
    return seconds


def _check_order(mine: Rows, theirs: Rows) -> None:
    """Raise an error unless two steps run the same compute in the same order."""
    if mine.num_ranks != theirs.num_ranks:
        raise ScheduleError(
            f"both steps must have as many ranks (predicted: {mine.num_ranks}, "
            f"recorded: {theirs.num_ranks})"
        )
    for rank in range(mine.num_ranks):
        pairs = zip(mine.works(rank), theirs.works(rank), strict=False)
        for position, (ours, other) in enumerate(pairs):
            if ours != other:
                raise ScheduleError(
                    f"rank {rank}, compute {position}: {ours} is predicted, but {other} was "
                    "recorded; compare a plan with a step that ran in its order"
                )
    lengths, others = np.diff(mine.first), np.diff(theirs.first)
    if (wrong := np.flatnonzero(lengths != others)).size:
        rank = int(wrong[0])
        raise ScheduleError(
            f"rank {rank} must run as many compute actions as predicted (predicted: "
            f"{lengths[rank]}, recorded: {others[rank]}); compare steps of as many microbatches"
        )


def _divide(value: float, by: float) -> float:
    """Return a ratio; 0 over 0 is 1, and anything else over 0 is infinite."""
    if by == 0:
        return inf if value else 1.0
    return value / by


def _add_up(tallies: Iterable[Tally], key: Callable[[Tally], _Key]) -> dict[_Key, Pair]:
    sums: dict[_Key, Pair] = {}
    for tally in sorted(tallies, key=lambda tally: (tally.rank, tally.kind, tally.stage)):
        so_far = sums.get(key(tally), Pair(0.0, 0.0))
        sums[key(tally)] = Pair(
            so_far.predicted + tally.seconds.predicted, so_far.recorded + tally.seconds.recorded
        )
    return sums


def _per_action(tally: Tally) -> Pair:
    return Pair(tally.seconds.predicted / tally.actions, tally.seconds.recorded / tally.actions)


def _line(name: str, pair: Pair) -> tuple[str, str, str, str]:
    return name, f"{pair.predicted:.4g}", f"{pair.recorded:.4g}", f"{pair.ratio:.2f}"
