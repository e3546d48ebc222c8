"""Routes of values once it is known which stages share a rank.

The modules of a split send each value from stage to stage, as if every stage had a rank of its
own. Where several stages of one rank need a value, it is sent there once and kept. That changes
along which edge a value comes, and neither what a stage gets nor what it returns.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.tensors.rerouting import Rerouting

__all__ = ["PlacedRoutes", "ValueRoutes", "dataflow_on", "place_values"]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRoutes:
    """The dataflow between the parts of a model, and what each of them does to follow it."""

    dataflow: Dataflow
    reroutings: tuple[Rerouting, ...]


class ValueRoutes(Protocol):
    """The values that go between the stages of a split."""

    def place(self, ranks: Sequence[Hashable]) -> PlacedRoutes | None:
        """Return the routes if stages with equal `ranks` share a rank; None if none change."""


def place_values(
    routes: ValueRoutes | None, num_stages: int, schedule: Schedule
) -> PlacedRoutes | None:
    """Return the routes of a pipe where stages share ranks as in a schedule; None if as before."""
    if routes is None or schedule.dataflow.num_parts != num_stages:
        return None
    return routes.place(_places_of_parts(schedule))


def dataflow_on(
    routes: ValueRoutes | None, num_stages: int, plain: Dataflow, schedule: Schedule
) -> Dataflow:
    """Return the dataflow of a pipe where it runs in the order of a schedule.

    It needs no stage of the pipe, so that a pipeline may keep it without keeping all of them.
    """
    placed = place_values(routes, num_stages, schedule)
    return plain if placed is None else placed.dataflow


def _places_of_parts(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the ranks of each part of the model, one for each copy of the model.

    Parts share a rank only if all of their copies do, because the copies have one dataflow.
    """
    flow, holder = schedule.dataflow, schedule.placement.rank_of_stage
    places: list[tuple[int, ...]] = [()] * flow.num_parts
    for stage, part in enumerate(flow.parts):
        places[part] = (*places[part], holder[stage])
    return places
