"""The simulator: from a schedule and its costs to a timeline."""

import numpy as np

from penstock.costs import Costs
from penstock.errors import DeadlockError
from penstock.ir.actions import Kind
from penstock.ir.clock import find_cycle, run_in_order
from penstock.ir.graph import Graph, build_graph
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.sim.given_costs import costs_or_unit
from penstock.sim.memory import held_bytes
from penstock.sim.timeline import Timeline

__all__ = ["simulate"]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule: when each action starts and ends, and what each rank holds.

    Ranks run their lists strictly in order; an action starts at the later of its rank's clock and
    its inputs' arrival. With sends and receives in the schedule, a transfer starts when both are
    reached. Single numbers in `costs` are one rank's share of the model, and lists have one number
    per stage; without `costs`, a rank's share takes a second each for F, I and W.

    >>> schedule = Schedule.from_orders([["0F0", "0B0"], ["1F0", "1B0"]])
    >>> simulate(schedule, Costs(forward=1, backward_input=1, backward_weight=1)).end_time
    6.0
    """
    costs = costs_or_unit(costs).of_stages(schedule)
    graph = build_graph(schedule)
    prices = costs.price(schedule, graph)
    run = run_in_order(
        schedule.rows, graph, duration=prices.duration, busy=prices.busy, lag=prices.lag
    )
    if not run.is_finished:
        ranks = ", ".join(map(str, find_cycle(schedule.rows, run)))
        raise DeadlockError(
            f"the schedule never finishes (ranks that wait for each other: {ranks}); "
            "penstock.check names the actions"
        )
    end = run.start + prices.duration
    if schedule.has_communication:
        _set_arrivals(schedule, graph, end, prices.lag)
    elif costs.send:
        end = run.start + prices.busy
    return Timeline(schedule, run.start, end, held_bytes(schedule, costs), prices)


def _set_arrivals(schedule: Schedule, graph: Graph, end: Floats, lag: Floats) -> None:
    """End each receive when its message has arrived, seen from the row that uses it."""
    receives = schedule.rows.is_kind(Kind.RECV_F, Kind.RECV_B)
    is_receive = receives[graph.need]
    # A row that needs a receive needs the matching send right after it; see ir/graph.py.
    receive, send = graph.need[is_receive], graph.need[np.flatnonzero(is_receive) + 1]
    seconds = lag[is_receive]
    end[receive] = np.maximum(end[receive], end[send]) + seconds
