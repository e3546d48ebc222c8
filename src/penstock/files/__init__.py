"""Formats on disk: timelines, traces and flight records, read strictly."""

from penstock.files.timeline import read_timeline, write_timeline
from penstock.files.trace.reading import read_trace

__all__ = [
    "read_timeline",
    "read_trace",
    "write_timeline",
]
