"""A stage that runs a graph."""
