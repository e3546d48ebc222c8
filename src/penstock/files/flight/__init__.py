"""Flight records: what each rank did last, readable after its process was killed."""

from typing import TYPE_CHECKING

from penstock.late_names import late_names

if TYPE_CHECKING:
    from penstock.files.flight.timeline import last_recorded_step
    from penstock.files.flight.waits import read_flights

__all__ = ["last_recorded_step", "read_flights"]

# Whoever could read a flight record seldom does.
_HOMES = {"last_recorded_step": "timeline", "read_flights": "waits"}

__getattr__, __dir__ = late_names(__name__, _HOMES)
