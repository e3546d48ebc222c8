"""Formats on disk: timelines, traces and flight records, read strictly."""

from typing import TYPE_CHECKING

from penstock.late_names import late_names

if TYPE_CHECKING:
    from penstock.files.timeline import read_timeline, write_timeline
    from penstock.files.trace.reading import read_trace

__all__ = [
    "read_timeline",
    "read_trace",
    "write_timeline",
]

# Most programs that could read a trace never do.
_HOMES = {
    "read_timeline": "timeline",
    "read_trace": "trace.reading",
    "write_timeline": "timeline",
}

__getattr__, __dir__ = late_names(__name__, _HOMES)
