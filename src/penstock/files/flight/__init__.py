"""Flight records: what each rank did last, readable after its process was killed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.files.flight.timeline import last_recorded_step
    from penstock.files.flight.waits import read_flights

__all__ = ["last_recorded_step", "read_flights"]

# Loaded when first used: whoever could read a flight record seldom does.
_HOMES = {"last_recorded_step": "timeline", "read_flights": "waits"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
