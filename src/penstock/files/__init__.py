"""Formats on disk: timelines, traces and flight records, read strictly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.files.timeline import read_timeline, write_timeline
    from penstock.files.trace.reading import read_trace

__all__ = [
    "read_timeline",
    "read_trace",
    "write_timeline",
]


def __getattr__(name: str) -> Any:
    # Loaded when first used: most programs that could read a trace never do.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "trace.reading" if name == "read_trace" else "timeline"
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
