"""Saving: agree who writes what, copy it to host memory, write it in the background."""

__all__: list[str] = []
