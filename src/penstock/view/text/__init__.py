"""Pictures and tables for the terminal, as text and Rich renderables."""

from typing import TYPE_CHECKING

from penstock.late_names import late_names

if TYPE_CHECKING:
    from penstock.view.text.flight import flight_view, step_title

__all__ = ["flight_view", "step_title"]

# Whoever could show a flight record seldom does.
_HOMES = {"flight_view": "flight", "step_title": "flight"}

__getattr__, __dir__ = late_names(__name__, _HOMES)
