"""The solver: good orders for a problem in a given time."""
