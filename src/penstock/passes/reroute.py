"""The same orders for a model whose parts have another dataflow."""

from dataclasses import replace

from penstock.errors import SizeError
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule

__all__ = ["reroute"]


def reroute(schedule: Schedule, dataflow: Dataflow) -> Schedule:
    """Return the orders of a chain as a schedule for this dataflow between parts.

    An order in which every part runs after the one before it suits any dataflow from lower to
    higher parts.

    >>> chain = Schedule.from_orders([["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]])
    >>> reroute(chain, Dataflow(3, [(0, 1), (1, 2), (0, 2)])).dataflow.edges
    ((0, 1), (0, 2), (1, 2))
    """
    parts = schedule.dataflow.parts
    if dataflow.num_stages != schedule.dataflow.num_parts or schedule.has_communication:
        raise SizeError(
            f"the schedule must have {dataflow.num_stages} parts and no communication to take "
            f"this dataflow (parts: {schedule.dataflow.num_parts}, communication: "
            f"{'yes' if schedule.has_communication else 'no'})"
        )
    return replace(schedule, dataflow=dataflow.with_parts(parts))
