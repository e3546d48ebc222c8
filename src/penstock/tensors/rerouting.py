"""Values that take another way between stages than the modules of the stages expect."""

from typing import Any, Protocol

__all__ = ["Rerouting"]


class Rerouting(Protocol):
    """What is done to the inputs and outputs of one stage, so that its module notices nothing."""

    def arguments(self, received: list[Any]) -> list[Any]:
        """Return the arguments of the module, from what came along the actual edges."""

    def output(self, output: Any) -> Any:
        """Return what leaves along the actual edges, from what the module returned."""
