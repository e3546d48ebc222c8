"""A step's batch: its rows, its microbatches, and agreement on it."""
