"""A rank's connections in the heartbeat tree: to the rank above it, and to those below."""

from logging import getLogger
from typing import Any

from penstock.ranks.tree.json_connection import ConnectionBrokenError, JsonConnection

__all__ = ["Neighbours"]

_LOGGER = getLogger(__name__)


class Neighbours:
    """Who is connected now; sending to a rank that is not connected does nothing."""

    def __init__(self) -> None:
        self.parent: JsonConnection | None = None
        # The rank that the parent is, or was last.
        self.above = 0
        self.children: dict[int, JsonConnection] = {}

    def ranks(self) -> set[int]:
        """Return the ranks that are connected."""
        return {*self.children, *([] if self.parent is None else [self.above])}

    def connections(self) -> list[JsonConnection]:
        """Return the connections to them."""
        return [*self.children.values(), *([] if self.parent is None else [self.parent])]

    def send_up(self, *words: Any) -> None:
        """Send a message to the rank above."""
        if self.parent is not None:
            self.send(self.parent, *words)

    def send_down(self, *words: Any) -> None:
        """Send a message to every rank right below."""
        for connection in list(self.children.values()):
            self.send(connection, *words)

    def send(self, connection: JsonConnection, *words: Any) -> None:
        """Send a message; that a connection is broken is left to whoever reads from it."""
        try:
            connection.send(*words)
        except ConnectionBrokenError as error:
            # Reading will find the same, after what was sent before the end.
            _LOGGER.debug("could not send: %s", error)
