"""Schedules as data: actions, placement, dataflow, orders, and who waits for whom."""
