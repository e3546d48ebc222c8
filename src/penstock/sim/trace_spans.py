"""The events of a trace that are actions: what ran where, from when to when, and what it says."""

from collections.abc import Mapping
from dataclasses import dataclass
from sys import float_info
from typing import Any

from penstock.errors import ParseError
from penstock.ir.actions import Action
from penstock.ir.text import parse_work
from penstock.sim.trace_events import Event

__all__ = ["ActionSpan", "count_of", "number_of", "read_span"]

# In microseconds; so that times can be added and multiplied without a look at their size.
_LATEST = 1e300
_TOO_MANY = 2**63


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """An action that an event tells of: its number in the file, its process, microseconds."""

    number: int
    process: int
    action: Action
    start: float
    end: float
    arguments: Mapping[str, Any]


def read_span(event: Event) -> ActionSpan:
    """The action that a complete event tells of; an event that tells of none is refused."""
    try:
        action = parse_work(_text_of(event.fields, "name"))
        if not isinstance(action, Action):
            raise ParseError(f"{action} is several actions; give each an event of its own")
        start = number_of(event.fields, "ts")
        end = start + number_of(event.fields, "dur")
        if end > _LATEST:
            raise ParseError(f"{action} ends at {end:g} microseconds, which is beyond all times")
        arguments = event.fields.get("args", {})
        if not isinstance(arguments, dict):
            raise ParseError(f"args is an object (got {arguments!r:.40})")
        process = count_of(event.fields, "pid")
        return ActionSpan(event.number, process, action, start, end, arguments)
    except ParseError as error:
        raise ParseError(f"event {event.number}: {error}") from error


def number_of(fields: Mapping[str, Any], name: str) -> float:
    """A number from 0 up that stands under this name.

    >>> number_of({"dur": -1}, "dur")
    Traceback (most recent call last):
    penstock.errors.ParseError: dur is -1; numbers go from 0 up
    """
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParseError(f"{name} is a number (got {value!r:.40})")
    if not 0 <= value <= float_info.max:
        raise ParseError(f"{name} is {value!r:.40}; numbers go from 0 up")
    return float(value)


def count_of(fields: Mapping[str, Any], name: str) -> int:
    """A whole number from 0 up that stands under this name."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _TOO_MANY:
        raise ParseError(f"{name} is a whole number from 0 up (got {value!r:.40})")
    return value


def _text_of(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ParseError(f"{name} is a text (got {value!r:.40})")
    return value
