"""Schedules written as tables: one line per rank, with gaps where the rank waits."""

from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule

__all__ = ["read_table"]


def read_table(*lines: str, dataflow: Dataflow | None = None) -> Schedule:
    """Return the schedule with these orders; gaps and short overlaps make them easier to read."""
    orders = [line.replace(")", ")OVERLAP_F_B").split() for line in lines]
    return Schedule.from_orders(orders, dataflow=dataflow)
