"""Timelines to draw in tests."""

from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import SizeError
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import FAMILIES
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from tests.covering import all_but_slow

__all__ = ["EVERY_FAMILY", "EVERY_NAME", "timeline_of"]

UNEVEN = Costs(forward=1.1, backward_input=1.7, backward_weight=0.6, transfer=0.3)


def timeline_of(name: str, ranks: int, microbatches: int, costs: Costs | None = None) -> Timeline:
    """Return the simulated timeline of a schedule by name."""
    return simulate(build(name, ranks=ranks, microbatches=microbatches), costs)


def _schedules() -> dict[str, Schedule]:
    """Build every family in a few sizes, as far as it exists for them."""
    schedules = {}
    for name in FAMILIES:
        for ranks, microbatches in ((1, 3), (2, 4), (3, 5), (4, 8), (8, 16)):
            try:
                schedule = build(name, ranks=ranks, microbatches=microbatches)
            except SizeError:
                continue
            schedules[f"{name}-{ranks}-{microbatches}"] = schedule
    return schedules


EVERY_FAMILY = {
    f"{size}-{price}": simulate(schedule, costs)
    for size, schedule in _schedules().items()
    for price, costs in (("unit", Costs()), ("uneven", UNEVEN))
}
# Their names as parameters: one rank, a number of ranks that divides little, and many of them.
EVERY_NAME = all_but_slow(
    EVERY_FAMILY, [name for name in EVERY_FAMILY if "-2-4-" not in name and "-4-8-" not in name]
)
