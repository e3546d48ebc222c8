"""From trace files to a timeline: our own traces, and those of torch's profiler."""

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import ParseError, ScheduleError
from penstock.files.trace.events import Event, Field, read_pieces
from penstock.files.trace.own import is_own, own_span, own_timeline
from penstock.files.trace.profiler import Profile, ProfiledProcess, processes_of, profiled_timeline
from penstock.files.trace.spans import ActionSpan
from penstock.sim.timeline import Timeline
from penstock.untrusted import clean_name

__all__ = ["read_trace"]

# The most actions, kernels and launches that are kept; other events are skipped.
_MOST_EVENTS = 5_000_000


def read_trace(path: Path | str, *more: Path | str, step: int = -1) -> Timeline:
    """Read a timeline from a trace that `write_trace` wrote, or from those of torch's profiler.

    The profiler writes a file per process; give those of all ranks. Of several profiled steps
    the last is taken, or `step`. A profiled range begins when the host reaches the action, so on
    a CPU the time of waiting for a message is part of the action that waits.
    """
    files = [Path(name) for name in (path, *more)]
    processes: list[ProfiledProcess] = []
    for file in files:
        try:
            found = _read(file)
            if isinstance(found, Timeline) and len(files) > 1:
                raise ParseError("this trace has all ranks; read it by itself")
        except ScheduleError as error:
            raise ParseError(f"{file}: {error}") from error
        if isinstance(found, Timeline):
            return found
        processes += found
    return _join(files, processes, step)


def _read(path: Path) -> Timeline | list[ProfiledProcess]:
    """Return the timeline of our own trace, or the processes in a profiler's file."""
    fields: dict[str, object] = {}
    spans: list[ActionSpan] = []
    profile = Profile()
    has_header = False
    for piece in read_pieces(path):
        match piece:
            case Field(name, value):
                fields[name] = value
            case Event(number):
                has_header = is_own(fields) if number == 0 else has_header
                if not has_header:
                    profile.add(piece)
                elif (span := own_span(piece)) is not None:
                    spans.append(span)
        if len(spans) + len(profile) > _MOST_EVENTS:
            raise ParseError(f"the trace must have at most {_MOST_EVENTS:,} actions and kernels")
    if is_own(fields) and not has_header:
        raise ParseError("the trace has no events after its header")
    return own_timeline(fields, spans) if has_header else processes_of(fields, profile)


def _join(files: Sequence[Path], processes: Sequence[ProfiledProcess], step: int) -> Timeline:
    try:
        name = clean_name(files[0].name.partition(".")[0])
        return profiled_timeline(processes, name=name, step=step)
    except ScheduleError as error:
        raise ParseError(f"{', '.join(map(str, files))}: {error}") from error
