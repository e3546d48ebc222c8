"""A rank as the others know it."""

from dataclasses import dataclass

__all__ = ["Member"]


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of the heartbeat tree: its name in messages, and which pipeline it belongs to."""

    rank: int
    name: str
    pipeline: int = 0
