"""What every row of a schedule costs, and every value that crosses ranks.

    |  receives  |  host  |  work  |  sends  |      one action of a schedule without messages:
    |<------- duration ----------->|                its result is there after `duration`,
    |<------------- busy ------------------->|      its rank is free after `busy`

Where a schedule has sends and receives, these have rows and host seconds of their own.
"""

from dataclasses import dataclass

import numpy as np

from penstock.costs.costs import Costs
from penstock.costs.gains import Gains, gain_of_rows
from penstock.ir.actions import Kind
from penstock.ir.graph import Graph
from penstock.ir.rows import Bools, Floats, Ints, Rows
from penstock.ir.schedule import Schedule

__all__ = ["Prices", "price", "scale_of_rows", "transfer_seconds"]

_SENDS = (Kind.SEND_F, Kind.SEND_B)
_MESSAGES = (*_SENDS, Kind.RECV_F, Kind.RECV_B)


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """The costs of one schedule: seconds per row, and seconds per need that crosses ranks.

    `duration` is the time until a row's result is there, `busy` how long it occupies its rank,
    and `host` the part of that which is the host's.
    """

    duration: Floats
    busy: Floats
    lag: Floats
    host: Floats


def price(costs: Costs, schedule: Schedule, graph: Graph) -> Prices:
    """Return what every row of a schedule costs, and every need that crosses ranks.

    Of a collective that runs beside compute, only the part that occupies its rank is in here.
    """
    rows = schedule.rows
    table = _seconds_by_kind(costs.of_stages(schedule), schedule.num_stages)
    duration = table[rows.kind, rows.stage]
    scale = None if costs.is_unscaled else scale_of_rows(costs, schedule)
    host = np.zeros(len(rows))
    if costs.host_action:
        works = rows.is_compute | rows.is_kind(Kind.RECOMPUTE)
        host += costs.host_action * (works & (duration > 0))
    if scale is not None:
        duration = duration * scale
    if rows.joined.any():
        duration = _price_overlaps(duration, rows, costs.overlap_gain)
    lag = transfer_seconds(costs, schedule, rows, graph)
    if costs.host_message and schedule.has_communication:
        host += costs.host_message * rows.is_kind(*_MESSAGES)
    elif costs.host_message:
        host += costs.host_message * _implied_messages(schedule, is_sent=False)
    if host.any():
        host = _sum_overlaps(host, rows.joined)
        duration = duration + host
    if schedule.has_communication or not (costs.send or costs.host_message):
        return Prices(duration, duration, lag, host)
    return _add_implied_sends(costs, schedule, graph, Prices(duration, duration, lag, host), scale)


def _add_implied_sends(
    costs: Costs, schedule: Schedule, graph: Graph, prices: Prices, scale: Floats | None
) -> Prices:
    """Let sends follow the work that they send, one after the other."""
    rows, crosses = schedule.rows, graph.link >= 0
    messages = _implied_messages(schedule, is_sent=True)
    each = costs.send + costs.host_message
    if scale is None:
        busy = prices.duration + each * _sum_overlaps(messages, rows.joined)
        queued = each * _queue(messages, rows.opening_row())
    else:
        sending = messages * (costs.send * scale + costs.host_message)
        busy = prices.duration + _sum_overlaps(sending, rows.joined)
        queued = _queue(sending, rows.opening_row())
    lag = prices.lag.copy()
    lag[crosses] += queued[graph.need[crosses]]
    host = prices.host + costs.host_message * _sum_overlaps(messages, rows.joined)
    return Prices(prices.duration, busy, lag, host)


def _queue(amount: Floats, opens: Ints) -> Floats:
    """Return, per row, the sum over the rows of its piece of work up to itself."""
    before = np.cumsum(amount) - amount
    queued: Floats = before + amount - before[opens]
    return queued


def transfer_seconds(costs: Costs, schedule: Schedule, rows: Rows, graph: Graph) -> Floats:
    """Return the seconds that each needed value is on its way from another rank.

    `rows` are those of the schedule, or more, and `graph` what they need.
    """
    transfer = costs.per_link(schedule.num_ranks)
    lag = np.zeros(len(graph.link))
    crosses = graph.link >= 0
    lag[crosses] = transfer[np.divmod(graph.link[crosses], schedule.num_ranks)]
    if not costs.is_unscaled:
        scales = costs.scales(schedule.microbatches)
        lag[crosses] *= scales[rows.microbatch[graph.need[crosses]]]
    return lag


def scale_of_rows(costs: Costs, schedule: Schedule) -> Floats:
    """Return the scale of each row's microbatch; 1 where an action has none."""
    scales = np.append(costs.scales(schedule.microbatches), 1.0)
    return scales[schedule.rows.microbatch]


def _seconds_by_kind(costs: Costs, num_stages: int) -> Floats:
    table = np.zeros((len(Kind), num_stages))
    table[Kind.FORWARD] = costs.per_stage("forward", num_stages)
    table[Kind.BACKWARD_INPUT] = costs.per_stage("backward_input", num_stages)
    table[Kind.BACKWARD_WEIGHT] = costs.per_stage("backward_weight", num_stages)
    if costs.full_backward is None:
        table[Kind.FULL_BACKWARD] = table[Kind.BACKWARD_INPUT] + table[Kind.BACKWARD_WEIGHT]
    else:
        table[Kind.FULL_BACKWARD] = costs.per_stage("full_backward", num_stages)
    table[Kind.RECOMPUTE] = costs.recompute_seconds(num_stages)
    table[Kind.SEND_F] = table[Kind.SEND_B] = costs.send
    for kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD):
        seconds = costs.per_stage(kind.name.lower(), num_stages)
        table[kind] = (1 - costs.collective_overlap) * seconds
    return table


def _implied_messages(schedule: Schedule, *, is_sent: bool) -> Floats:
    """Return how many messages each row of a compute-only schedule sends, or receives."""
    flow, holder = schedule.dataflow, schedule.placement.rank_of_stage
    counts = np.zeros((len(Kind), schedule.num_stages))
    for stage in range(schedule.num_stages):
        after = sum(holder[other] != holder[stage] for other in flow.consumers(stage))
        before = sum(holder[other] != holder[stage] for other in flow.producers(stage))
        counts[Kind.FORWARD, stage] = after if is_sent else before
        counts[[Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD], stage] = before if is_sent else after
    return counts[schedule.rows.kind, schedule.rows.stage]


def _price_overlaps(duration: Floats, rows: Rows, gains: Gains) -> Floats:
    """Give every member of an overlap the duration of the whole."""
    opens = np.flatnonzero(~rows.joined)
    shortest = np.minimum.reduceat(duration, opens)
    size = np.diff(np.append(opens, len(duration)))
    saved: Floats = np.where(size > 1, shortest, 0.0)
    each = np.repeat(saved, size) * gain_of_rows(gains, rows)
    return _sum_overlaps(duration, rows.joined) - each


def _sum_overlaps(column: Floats, joined: Bools) -> Floats:
    """Return, for every row, the sum over the piece of work that it is part of."""
    opens = np.flatnonzero(~joined)
    size = np.diff(np.append(opens, len(column)))
    total: Floats = np.add.reduceat(column, opens)
    return np.repeat(total, size)
