"""The playground: one page in which schedules are priced, played, changed and checked."""

from typing import TYPE_CHECKING

from penstock.late_names import late_names

if TYPE_CHECKING:
    from penstock.view.playground.page import playground

__all__ = ["playground"]

# The help of the command that writes the page needs none of it.
_HOMES = {"playground": "page"}

__getattr__, __dir__ = late_names(__name__, _HOMES)
