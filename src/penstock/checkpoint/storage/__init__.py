"""Where checkpoints are kept: local folders and object stores, steps in them, and the lease."""

__all__: list[str] = []
