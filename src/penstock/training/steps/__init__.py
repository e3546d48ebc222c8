"""A step, in the same phases on every rank."""
