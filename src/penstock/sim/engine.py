"""The simulator: from a schedule and its costs to a timeline."""

import numpy as np

from penstock.costs import Costs
from penstock.costs.given import costs_or_unit
from penstock.errors import DeadlockError
from penstock.ir.actions import Kind
from penstock.ir.clock import find_cycle
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule, require_schedule
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.passes.shard import add_unshard_reshard
from penstock.sim.memory import held_bytes
from penstock.sim.program import Program, make_program
from penstock.sim.timeline import Timeline

__all__ = ["simulate"]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule: when each action starts and ends, and what each rank holds.

    Ranks run their lists strictly in order; an action starts at the later of its rank's clock and
    its inputs' arrival. With sends and receives in the schedule, a transfer starts when both are
    reached. Single numbers in `costs` are one rank's share of the model, and lists have one number
    per stage; without `costs`, a rank's share takes a second each for F, I and W.

    Where collectives take time and the schedule has none, the timeline has them where `lower`
    puts them.

    >>> schedule = Schedule.from_orders([["0F0", "0B0"], ["1F0", "1B0"]])
    >>> simulate(schedule, Costs(forward=1, backward_input=1, backward_weight=1)).end_time
    6.0
    """
    require_schedule(schedule)
    costs = costs_or_unit(costs).of_stages(schedule)
    schedule = with_collectives(schedule, costs)
    program = make_program(schedule, costs)
    run = program.run()
    if not run.is_finished:
        ranks = ", ".join(map(str, find_cycle(schedule.rows, run)))
        raise DeadlockError(
            f"the schedule never finishes (ranks that wait for each other: {ranks}); "
            "penstock.check names the actions"
        )
    start, prices = run.start, program.prices
    end = start + (prices.duration if schedule.has_communication else prices.busy)
    if schedule.has_communication:
        _set_arrivals(program, end)
    if program.rows is not schedule.rows:
        program.show(start, end)
        start, end = start[: len(schedule.rows)], end[: len(schedule.rows)]
    return Timeline(schedule, start, end, held_bytes(schedule, costs), program)


def with_collectives(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the schedule with the collectives that take any time, where `lower` puts them.

    A schedule that has some of a kind is taken to have all of that kind.
    """
    if not costs.has_collectives:
        return schedule
    rows = schedule.rows
    has_shards = rows.is_kind(Kind.UNSHARD, Kind.RESHARD).any()
    if (np.any(costs.unshard) or np.any(costs.reshard)) and not has_shards:
        schedule = add_unshard_reshard(schedule)
    if np.any(costs.reduce_grad) and not rows.is_kind(Kind.REDUCE_GRAD).any():
        schedule = add_reduce_grad(schedule)
    return schedule


def _set_arrivals(program: Program, end: Floats) -> None:
    """End each receive when its message has arrived, seen from the row that uses it."""
    graph, lag = program.graph, program.prices.lag
    receives = program.rows.is_kind(Kind.RECV_F, Kind.RECV_B)
    is_receive = receives[graph.need]
    # A row that needs a receive needs the matching send right after it; see ir/graph.py.
    receive, send = graph.need[is_receive], graph.need[np.flatnonzero(is_receive) + 1]
    seconds = lag[is_receive]
    end[receive] = np.maximum(end[receive], end[send]) + seconds
