"""Why a recorded step took longer, or shorter, than predicted: seconds that add up.

The recorded order is simulated again and again, and each time one more fact of the prediction is
replaced by what was recorded. What that changes is the seconds of a cause:

  predicted -> compute -> imbalance -> waiting -> sharding -> link -> host -> recorded

So the causes add up to the difference, whatever they are. They depend on this order: compute comes
first, and the host gets what nothing else explains.
"""

from dataclasses import dataclass, fields, replace
from math import floor, log10

import numpy as np

from penstock.costs import Prices
from penstock.ir.actions import Kind
from penstock.ir.clock import run_in_order
from penstock.ir.graph import Graph, build_graph
from penstock.ir.rows import ABSENT, Bools, Floats, Rows
from penstock.ir.schedule import Schedule
from penstock.sim.repeated import recorded_prices
from penstock.sim.timeline import Timeline
from penstock.sim.waits import find_waits
from penstock.units import format_share

__all__ = ["Difference", "find_difference", "has_same_compute"]

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_SHARDING = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)
# Seconds below this share of the step are rounding errors.
_ROUNDING = 1e-9
# Seconds below this share of the step explain nothing; they were printed as 3.8e-06 s.
_LEAST_SHARE = 5e-4

_MEANINGS = {
    "compute": "all actions together took {longer}",
    "imbalance": "stages and kinds took other shares of the work",
    "waiting": "single actions vary, and ranks wait for the slow ones",
    "sharding": "parameters were gathered and gradients reduced",
    "link": "messages took {longer} from rank to rank",
    "host": "ranks started messages, or paused with all that they needed",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The seconds by which a recorded step is longer than predicted, by cause.

    `compute` is what one factor on all actions explains, `imbalance` what the means of each stage
    and kind explain beyond that, `waiting` the variation around these means. `sharding` is for
    gathering parameters and reducing gradients, `link` for messages on their way, and `host` for
    what ranks do between actions. Causes that made the step shorter are below 0.
    """

    predicted: float
    recorded: float
    compute: float
    imbalance: float
    waiting: float
    sharding: float
    link: float
    host: float

    @property
    def seconds(self) -> float:
        """The recorded seconds less the predicted ones."""
        return self.recorded - self.predicted

    @property
    def by_cause(self) -> dict[str, float]:
        """The causes with their seconds, the largest first; they add up to `seconds`."""
        named = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return dict(sorted(named.items(), key=lambda item: -abs(item[1])))

    @property
    def sentences(self) -> dict[str, str]:
        """The causes that matter, the largest first, each with a sentence about it."""
        least = _LEAST_SHARE * max(self.predicted, self.recorded)
        return {
            cause: _MEANINGS[cause].format(longer="longer" if seconds > 0 else "less time")
            for cause, seconds in self.by_cause.items()
            if abs(seconds) > least
        }

    def __str__(self) -> str:
        least = _ROUNDING * max(self.predicted, self.recorded)
        if abs(self.seconds) <= least:
            first = f"the step took {self.recorded:.4g} s, as predicted"
        else:
            share = ""
            if self.predicted:
                share = f" ({format_share(abs(self.seconds) / self.predicted)})"
            first = (
                f"the step took {self.recorded:.4g} s, {abs(self.seconds):.4g} s{share} "
                f"{_longer(self.seconds)} than predicted"
            )
        # As many decimals as the step has with four digits.
        decimals = 3 - floor(log10(max(self.predicted, self.recorded) or 1))
        lines = [
            f"  {round(getattr(self, cause), decimals):+.4g} s  {cause}: {sentence}"
            for cause, sentence in self.sentences.items()
        ]
        return "\n".join([first + ":" * bool(lines), *lines])


def _longer(seconds: float) -> str:
    return "longer" if seconds > 0 else "shorter"


def find_difference(predicted: Timeline, recorded: Timeline) -> Difference:
    """Find why a recorded step differs from its prediction; both run the same compute in order.

    >>> from penstock.assembly import build
    >>> from penstock.costs import Costs
    >>> from penstock.sim.engine import simulate
    >>> schedule = build("1F1B", ranks=2, microbatches=4)
    >>> slower = simulate(schedule, Costs(forward=2, full_backward=4, transfer=0.5))
    >>> print(find_difference(simulate(schedule), slower))
    the step took 32 s, 17 s (113.3 %) longer than predicted:
      +15 s  compute: all actions together took longer
      +2 s  link: messages took longer from rank to rank
    """
    schedule = recorded.schedule
    rows, graph = schedule.rows, build_graph(schedule)
    truth = recorded_prices(schedule, recorded.start, recorded.end).duration
    is_sharding = rows.is_kind(*_SHARDING)
    now = _predict_again(predicted, schedule, graph)
    ends = [predicted.end_time, _end(schedule, graph, now)]
    for duration in (
        now.duration * _common_factor(rows, now.duration, truth),
        np.where(rows.is_compute, _means(rows, truth), now.duration),
        np.where(rows.is_compute, truth, now.duration),
        np.where(rows.is_compute | is_sharding, truth, now.duration),
    ):
        after = now.busy - now.duration
        now = replace(now, duration=duration, busy=duration + after)
        ends.append(_end(schedule, graph, now))
    ends.append(_end(schedule, graph, replace(now, lag=_recorded_lags(recorded, graph))))
    ends.append(recorded.end_time)
    messages, compute, imbalance, waiting, sharding, link, host = np.diff(ends).tolist()
    return Difference(
        predicted.end_time,
        recorded.end_time,
        compute=compute,
        imbalance=imbalance,
        waiting=waiting,
        sharding=sharding,
        link=messages + link,
        host=host,
    )


def has_same_compute(one: Schedule, other: Schedule) -> bool:
    """Return whether two schedules run the same compute in the same order on every rank."""
    ours, theirs = (schedule.rows.keep(schedule.rows.is_compute) for schedule in (one, other))
    pairs = zip((ours.first, *ours.columns), (theirs.first, *theirs.columns), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def _end(schedule: Schedule, graph: Graph, prices: Prices) -> float:
    """Return the end time of a schedule at these prices."""
    rows = schedule.rows
    run = run_in_order(rows, graph, duration=prices.duration, busy=prices.busy, lag=prices.lag)
    end = np.where(rows.is_kind(*_RECEIVES), -np.inf, run.start + prices.busy)
    return float(end.max() - run.start[rows.is_compute].min())


def _predict_again(predicted: Timeline, schedule: Schedule, graph: Graph) -> Prices:
    """Return the predicted prices of the recorded rows.

    Compute keeps its seconds, and so does what follows it on its rank: sends, and the time of the
    host. Rows that the prediction lacks take no time. A link is as slow as predicted.
    """
    rows = schedule.rows
    old = None if predicted.program is None else predicted.program.prices
    if old is None or len(old.duration) != len(predicted.schedule.rows):
        # Recorded, or with collectives and wires beside the rows: as if it had been recorded.
        old = recorded_prices(predicted.schedule, predicted.start, predicted.end)
    source = predicted.schedule.rows.is_compute
    duration, busy = np.zeros(len(rows)), np.zeros(len(rows))
    duration[rows.is_compute], busy[rows.is_compute] = old.duration[source], old.busy[source]
    links = build_graph(predicted.schedule).link
    table = np.zeros(schedule.num_ranks**2)
    crosses = links != ABSENT
    np.maximum.at(table, links[crosses], old.lag[crosses])
    lag = np.where(graph.link != ABSENT, table[graph.link], 0.0)
    return Prices(duration, busy, lag, np.zeros(len(rows)))


def _common_factor(rows: Rows, predicted: Floats, recorded: Floats) -> Floats:
    """Return, per row, by what all compute took longer; 1 for other rows."""
    counted = rows.is_compute & ~rows.joined
    before, after = predicted[counted].sum(), recorded[counted].sum()
    return np.where(rows.is_compute, after / before if before else 1.0, 1.0)


def _means(rows: Rows, seconds: Floats) -> Floats:
    """Return, per row, the mean over all work that has the same stages and kinds."""
    opens = rows.opening_row()
    size = np.bincount(opens, minlength=len(rows))
    key = np.stack([rows.stage[opens], rows.kind[opens], size[opens]])
    _, group = np.unique(key, axis=1, return_inverse=True)
    totals = np.bincount(group, seconds) / np.bincount(group)
    means: Floats = totals[group]
    return means


def _recorded_lags(recorded: Timeline, graph: Graph) -> Floats:
    """Return what each message took from the start of its send until it was there.

    A message that nobody waited for may have been there earlier, so it counts as the fastest of
    its link.
    """
    rows, start, end = recorded.schedule.rows, recorded.start, recorded.end
    if not recorded.schedule.has_communication:
        return recorded_prices(recorded.schedule, start, end).lag
    user = np.repeat(np.arange(len(rows)), np.diff(graph.first))
    free = find_waits(recorded).free
    # A row that needs a receive needs the matching send right after it; see ir/graph.py.
    is_receive: Bools = rows.is_kind(*_RECEIVES)[graph.need]
    slot = np.flatnonzero(is_receive)
    receive, send = graph.need[slot], graph.need[slot + 1]
    taken = np.maximum(end[receive] - np.maximum(start[receive], start[send]), 0.0)
    link = graph.link[slot]
    fastest = np.full(recorded.schedule.num_ranks**2, np.inf)
    np.minimum.at(fastest, link, taken)
    was_awaited = end[receive] > free[user[slot]]
    lag = np.zeros(len(graph.need))
    lag[slot] = lag[slot + 1] = np.where(was_awaited, taken, fastest[link])
    return lag
