"""Splitting by tracing: the model becomes one graph, which is cut."""
