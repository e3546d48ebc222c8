"""Thousands of steps over random schedules, with faults on the way."""
