"""Schedules as small pictures: one line per rank, spaces between its actions."""

from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule

__all__ = ["Orders", "orders_of", "read_orders", "read_schedule"]

Orders = list[list[str]]


def read_orders(text: str) -> Orders:
    """Every rank's actions as text."""
    return [line.split() for line in text.strip().splitlines()]


def read_schedule(text: str, dataflow: Dataflow | None = None) -> Schedule:
    """The schedule that a picture shows."""
    return Schedule.from_orders(read_orders(text), dataflow=dataflow)


def orders_of(schedule: Schedule) -> Orders:
    """A schedule in the form of `read_orders`."""
    return [[str(work) for work in order] for order in schedule.orders]
