"""Schedules priced for the same model, however many stages each cuts it into."""

from collections.abc import Sequence

from penstock.costs import Costs
from penstock.costs.given import costs_or_unit
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline

__all__ = ["compare", "costs_for"]


def compare(schedules: Sequence[Schedule], costs: Costs | None = None) -> dict[str, Timeline]:
    """Simulate schedules side by side, by name, all for the same model.

    A single number in `costs` is for one rank's share of the model, and is divided among the
    stages of that rank; see `costs_for`.

    >>> from penstock.assembly import build
    >>> schedules = [build(name, ranks=4, microbatches=8) for name in ("1F1B", "ZBV")]
    >>> {name: timeline.end_time for name, timeline in compare(schedules).items()}
    {'1F1B': 33.0, 'ZBV': 25.5}
    """
    costs = costs_or_unit(costs)
    timelines: dict[str, Timeline] = {}
    for schedule in schedules:
        name, copy = schedule.name, 2
        while name in timelines:
            name, copy = f"{schedule.name} ({copy})", copy + 1
        timelines[name] = simulate(schedule, costs_for(schedule, costs))
    return timelines


def costs_for(schedule: Schedule, costs: Costs) -> Costs:
    """Return the costs of a schedule's stages, from costs per rank or per piece of a model.

    Single numbers are one rank's share. Lists are for consecutive pieces of the model, which are
    joined or divided evenly to make the stages; copies of a part cost what the part costs.
    """
    flow = schedule.dataflow
    return costs.recut(schedule.num_ranks, flow.num_parts).for_parts(flow.parts)
