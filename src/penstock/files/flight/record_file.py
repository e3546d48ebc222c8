"""Flight records as files: what a rank did last, readable after its process was killed.

The file is memory of the process that writes it, which the system keeps however that process ends.
A new record goes over the oldest one, with its number as the last thing written: if it is cut off
in the middle, it lies where the oldest was, and there no reader looks.
"""

import mmap
import os
import socket
import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ArgumentError, ParseError, ScheduleError
from penstock.files.flight.layout import (
    AWAITED,
    DOING,
    END,
    HEADER,
    LATEST,
    MAGIC,
    MOST_RECORDS,
    MOST_STAGES,
    READY,
    RECORD,
    RECORD_TYPE,
    SIGNS,
    TIME,
    VERSION,
    WAIT,
)
from penstock.files.flight.log import Doing, FlightLog, Phase
from penstock.files.flight.ring import check, in_order
from penstock.ir.placement import Placement
from penstock.ir.rows import ABSENT

__all__ = ["FlightWriter", "flight_path", "read_flight"]

_NOTHING: Final = DOING.pack(ABSENT, ABSENT, ABSENT, ABSENT)
# A file is not read any further than a flight record can go.
_MOST_BYTES = HEADER.size + SIGNS.size + 4 * MOST_STAGES + RECORD.size * MOST_RECORDS + 1


def flight_path(folder: Path | str, rank: int) -> Path:
    """The file of one rank in a folder of flight records."""
    return Path(folder) / f"rank{rank}.flight"


class FlightWriter:
    """Notes what this rank does, action by action; each call takes well under a microsecond.

    An action is started and ended; in between it may wait for messages, one after another, each
    of which then has arrived. Whoever calls `beat` now and then, from any thread, tells readers
    until when the process lived.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        rank: int,
        placement: Placement,
        schedule: str = "custom",
        capacity: int = 4096,
        clock_offset_seconds: float = 0.0,
    ) -> None:
        if not 2 <= capacity <= MOST_RECORDS:
            raise ArgumentError(
                f"a flight record holds 2 to {MOST_RECORDS} actions (capacity: {capacity})"
            )
        self.path = Path(path)
        header = HEADER.pack(
            MAGIC,
            VERSION,
            capacity,
            rank,
            placement.num_stages,
            os.getpid(),
            time.time() + clock_offset_seconds,
            time.perf_counter(),
            _fit(socket.gethostname()),
            _fit(schedule),
        )
        stages = np.array(placement.rank_of_stage, dtype="<u4").tobytes()
        self._first = HEADER.size + SIGNS.size + len(stages)
        size = self._first + capacity * RECORD.size
        with self.path.open("w+b") as file:
            # In full, for a file with holes would end its process when the disk is full.
            file.write((header + bytes(SIGNS.size) + stages).ljust(size, b"\0"))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), size)
        self._capacity = capacity
        self._number = 0
        self._step = 0
        self._place = self._first

    @staticmethod
    def encode(doing: Doing) -> bytes:
        """An action or phase as `start` and `wait` take it; made once, used in every step."""
        if isinstance(doing, Phase):
            return DOING.pack(doing, ABSENT, ABSENT, ABSENT)
        numbers = (ABSENT if n is None else n for n in (doing.microbatch, doing.peer))
        return DOING.pack(doing.kind, doing.stage, *numbers)

    def begin_step(self, number: int) -> None:
        """What is started from now on belongs to this step."""
        self._step = number

    def start(self, encoded: bytes) -> None:
        """Begin an action."""
        number = self._number
        self._place = place = self._first + number % self._capacity * RECORD.size
        self._number = number = number + 1
        now = time.perf_counter()
        RECORD.pack_into(
            self._memory, place, self._step, now, encoded, _NOTHING, 0.0, 0.0, 0.0, number
        )

    def wait(self, encoded: bytes) -> None:
        """The action begins to wait for a message, given as the receive or the send of it."""
        WAIT.pack_into(self._memory, self._place + AWAITED, encoded, time.perf_counter(), 0.0)

    def arrived(self) -> None:
        """What the action waited for is there."""
        TIME.pack_into(self._memory, self._place + READY, time.perf_counter())

    def end(self) -> None:
        """End the action."""
        TIME.pack_into(self._memory, self._place + END, time.perf_counter())

    def beat(self) -> None:
        """Show that the process lives; any thread may call this at any time."""
        TIME.pack_into(self._memory, HEADER.size, time.perf_counter())

    def close(self, *, keep: bool) -> None:
        """Leave the file for whoever wants to know what happened, or remove it."""
        if keep:
            TIME.pack_into(self._memory, HEADER.size + TIME.size, time.perf_counter())
        else:
            self.path.unlink(missing_ok=True)


def _fit(name: str) -> bytes:
    """As much of a name as its field holds."""
    return name.encode(errors="replace")[:64].decode(errors="ignore").encode()


def read_flight(path: Path | str) -> FlightLog:
    """Read what a `FlightWriter` wrote; anything else is refused by name.

    A record that was being written when its process ended is left out, or taken as far as it got.
    """
    file = Path(path)
    with file.open("rb") as stream:
        data = stream.read(min(os.fstat(stream.fileno()).st_size, _MOST_BYTES))
    try:
        return _parse(file, data)
    except ScheduleError as error:
        raise ParseError(f"{file} is no flight record: {error}") from error


def _parse(path: Path, data: bytes) -> FlightLog:
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise ParseError(f"it has {len(data)} bytes and begins with {data[: len(MAGIC)]!r}")
    _, version, capacity, rank, stages, process, wall, clock, host, schedule = HEADER.unpack_from(
        data
    )
    if version != VERSION:
        raise ParseError(f"it has version {version}, and what is read here is version {VERSION}")
    if not 2 <= capacity <= MOST_RECORDS or not 1 <= stages <= MOST_STAGES:
        raise ParseError(f"no pipeline has {stages} stages and keeps {capacity} records")
    first = HEADER.size + SIGNS.size + 4 * stages
    size = first + capacity * RECORD.size
    if len(data) != size:
        raise ParseError(f"it has {len(data)} bytes where its header announces {size}")
    holders = np.frombuffer(data, "<u4", stages, HEADER.size + SIGNS.size)
    placement = _placement(holders, rank)
    heard, closed = SIGNS.unpack_from(data, HEADER.size)
    for moment in (wall, clock, heard, closed):
        if not 0 <= moment < LATEST:
            raise ParseError(f"{moment} is no time")
    table = in_order(np.frombuffer(data, RECORD_TYPE, capacity, first))
    check(table, holders == rank)
    return FlightLog(
        path,
        rank,
        placement,
        _name(schedule),
        _name(host),
        process,
        wall,
        heard + wall - clock if heard else None,
        closed + wall - clock if closed else None,
        wall - clock,
        table,
    )


def _placement(holders: NDArray[np.uint32], rank: int) -> Placement:
    highest = int(holders.max())
    if highest >= len(holders) or rank > highest:
        raise ParseError(f"rank {max(rank, highest)} holds none of its {len(holders)} stages")
    return Placement(tuple(holders.tolist()))


def _name(field: bytes) -> str:
    try:
        name = field.rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise ParseError(f"a name in it is no text: {error}") from error
    if not name.isprintable():
        raise ParseError(f"a name in it cannot be printed: {name!r}")
    return name
