"""The events of a trace that are actions, with process, times and arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ParseError
from penstock.files.trace.events import Event
from penstock.ir.actions import Action
from penstock.ir.text import parse_work
from penstock.untrusted import LARGEST_SUM, quote, to_quantity

__all__ = ["ActionSpan", "count_of", "number_of", "read_span"]

_TOO_MANY = 2**63


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """An action of an event: the event's number, its process, and times in microseconds."""

    number: int
    process: int
    action: Action
    start: float
    end: float
    arguments: Mapping[str, Any]


def read_span(event: Event) -> ActionSpan:
    """Return the action of a complete event; an event that is not an action is an error."""
    try:
        action = parse_work(_text_of(event.fields, "name"))
        if not isinstance(action, Action):
            raise ParseError(f"{action} holds several actions; give each an event of its own")
        start = number_of(event.fields, "ts")
        end = start + number_of(event.fields, "dur")
        arguments = event.fields.get("args", {})
        if not isinstance(arguments, dict):
            raise ParseError(f"args must be an object (got {quote(arguments)})")
        process = count_of(event.fields, "pid")
        return ActionSpan(event.number, process, action, start, end, arguments)
    except ParseError as error:
        raise ParseError(f"event {event.number}: {error}") from error


def number_of(fields: Mapping[str, Any], name: str) -> float:
    """Return the seconds, microseconds or bytes in the field with this name.

    >>> number_of({"dur": -1}, "dur")
    Traceback (most recent call last):
    penstock.errors.ParseError: dur must be a number from 0 to 1e+150 (got -1)
    """
    value = fields.get(name)
    number = to_quantity(value, LARGEST_SUM)
    if number is None:
        raise ParseError(f"{name} must be a number from 0 to {LARGEST_SUM:g} (got {quote(value)})")
    return number


def count_of(fields: Mapping[str, Any], name: str) -> int:
    """Return the whole number in the field with this name, from 0 up."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _TOO_MANY:
        raise ParseError(f"{name} must be a whole number from 0 up (got {quote(value)})")
    return value


def _text_of(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ParseError(f"{name} must be a string (got {quote(value)})")
    return value
