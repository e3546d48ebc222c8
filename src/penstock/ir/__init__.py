"""Schedules as data: actions, placement, dataflow, orders, and what each action waits for."""
