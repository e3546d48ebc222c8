"""The device work of a host's ranges, found by when each kernel was launched.

host      |0F0     |0B0      |      a backward launches its kernels from another thread, so that
launches     ^ ^    ^    ^          only the moment of a launch says to which range it belongs
device         |==|==|   |==|==|
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import ParseError
from penstock.files.trace.events import Event
from penstock.files.trace.spans import number_of
from penstock.ir.rows import Floats

__all__ = ["DeviceWork", "Stretches", "find_stretches"]

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Links what the device did to the call that asked for it.
_LINK = "correlation"


@dataclass(slots=True)
class DeviceWork:
    """Launches by link and moment, and what the device did by link, start and end."""

    launch_link: array[int] = field(default_factory=lambda: array("q"))
    launched: array[float] = field(default_factory=lambda: array("d"))
    link: array[int] = field(default_factory=lambda: array("q"))
    start: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))

    def add(self, event: Event) -> None:
        """Take an event that is a launch or device work; skip others."""
        category, arguments = event.fields.get("cat"), event.fields.get("args")
        link = arguments.get(_LINK) if isinstance(arguments, dict) else None
        if not isinstance(link, int) or not 0 <= link < 2**63:
            return
        try:
            if category in _LAUNCHES:
                self.launched.append(number_of(event.fields, "ts"))
                self.launch_link.append(link)
            elif category in _WORK:
                start = number_of(event.fields, "ts")
                self.end.append(start + number_of(event.fields, "dur"))
                self.start.append(start)
                self.link.append(link)
        except ParseError as error:
            raise ParseError(f"event {event.number}: {error}") from error

    def __len__(self) -> int:
        return len(self.launched) + len(self.start)


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """For every range the start of its first and the end of its last kernel, if it has any."""

    start: Floats
    end: Floats


def find_stretches(work: DeviceWork, range_start: Floats, range_end: Floats) -> Stretches:
    """Return each range's stretch of device work; ranges are sorted and do not overlap.

    A range without work starts at infinity and ends at minus infinity.
    """
    found = Stretches(np.full(len(range_start), np.inf), np.full(len(range_start), -np.inf))
    order = np.argsort(np.array(work.launch_link), kind="stable")
    links, moments = np.array(work.launch_link)[order], np.array(work.launched)[order]
    link = np.array(work.link)
    place = np.minimum(np.searchsorted(links, link), len(links) - 1)
    if not len(links):
        return found
    launched = np.where(links[place] == link, moments[place], -np.inf)
    owner = np.searchsorted(range_start, launched, side="right") - 1
    is_owned = (owner >= 0) & (launched <= range_end[owner])
    np.minimum.at(found.start, owner[is_owned], np.array(work.start)[is_owned])
    np.maximum.at(found.end, owner[is_owned], np.array(work.end)[is_owned])
    return found
