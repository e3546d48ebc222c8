"""Flight records as files: what a rank did last, readable after its process was killed.

The file is mapped into the memory of its process, so the system keeps it however the process ends.
A new record overwrites the oldest one, and its number is written last: if it is cut off in the
middle, it is in the place of the oldest, which readers leave out.
"""

import mmap
import os
import socket
import time
from pathlib import Path
from time import perf_counter
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
    START,
    TIME,
    VERSION,
    WAIT,
)
from penstock.files.flight.log import Doing, FlightLog, Phase
from penstock.files.flight.ring import check, in_order
from penstock.ir.placement import Placement
from penstock.ir.rows import ABSENT

__all__ = ["FlightWriter", "flight_path", "read_flight"]

# What a record has between its action and its number at first: no message, and no times yet.
_NOTHING: Final = WAIT.pack(DOING.pack(ABSENT, ABSENT, ABSENT, ABSENT), 0.0, 0.0) + TIME.pack(0.0)
# Bound once, because every action of a step calls them.
_pack_start, _pack_wait, _pack_time = START.pack_into, WAIT.pack_into, TIME.pack_into
_RECORD_BYTES: Final = RECORD.size
# The largest possible flight record; nothing beyond it is read.
_MOST_BYTES = HEADER.size + SIGNS.size + 4 * MOST_STAGES + RECORD.size * MOST_RECORDS + 1


def flight_path(folder: Path | str, rank: int) -> Path:
    """Return the file of one rank in a folder of flight records."""
    return Path(folder) / f"rank{rank}.flight"


class FlightWriter:
    """Records what this rank does, action by action; each call takes well under a microsecond.

    An action is started and ended; in between it may wait for messages, one after another. `beat`,
    which any thread may call, records how long the process was alive.
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
                f"capacity must be from 2 to {MOST_RECORDS} actions (got {capacity})"
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
            # In full, because a sparse file would kill its process when the disk is full.
            file.write((header + bytes(SIGNS.size) + stages).ljust(size, b"\0"))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), size)
        self._capacity = capacity
        self._number = 0
        self._step = 0
        self._place = self._first

    @staticmethod
    def encode(doing: Doing) -> bytes:
        """Return an action or phase as `start` and `wait` take it; encode it once."""
        if isinstance(doing, Phase):
            return DOING.pack(doing, ABSENT, ABSENT, ABSENT)
        numbers = (ABSENT if n is None else n for n in (doing.microbatch, doing.peer))
        return DOING.pack(doing.kind, doing.stage, *numbers)

    def begin_step(self, number: int) -> None:
        """Begin a step; later actions belong to it."""
        self._step = number

    def start(self, encoded: bytes) -> float:
        """Begin an action, and return the time of the monotonic clock."""
        now = perf_counter()
        self._begin(encoded, now)
        return now

    def follow(self, encoded: bytes) -> float:
        """End an action and begin the next one at the same time, which is returned."""
        now = perf_counter()
        _pack_time(self._memory, self._place + END, now)
        self._begin(encoded, now)
        return now

    def _begin(self, encoded: bytes, now: float) -> None:
        number = self._number
        self._place = place = self._first + number % self._capacity * _RECORD_BYTES
        self._number = number = number + 1
        _pack_start(self._memory, place, self._step, now, encoded, _NOTHING, number)

    def wait(self, encoded: bytes) -> None:
        """Begin to wait for a message, given as its receive or its send."""
        _pack_wait(self._memory, self._place + AWAITED, encoded, perf_counter(), 0.0)

    def arrived(self) -> None:
        """Note that the awaited message has arrived."""
        _pack_time(self._memory, self._place + READY, perf_counter())

    def end(self) -> None:
        """End the action."""
        _pack_time(self._memory, self._place + END, perf_counter())

    def beat(self) -> None:
        """Give a sign of life; any thread may call this at any time."""
        TIME.pack_into(self._memory, HEADER.size, time.perf_counter())

    def close(self, *, keep: bool) -> None:
        """Keep the file for later diagnosis, or remove it."""
        if keep:
            TIME.pack_into(self._memory, HEADER.size + TIME.size, time.perf_counter())
        else:
            self.path.unlink(missing_ok=True)


def _fit(name: str) -> bytes:
    """Cut a name to the size of its field."""
    return name.encode(errors="replace")[:64].decode(errors="ignore").encode()


def read_flight(path: Path | str) -> FlightLog:
    """Read what a `FlightWriter` wrote; an error names the file.

    A record that was being written when its process ended is left out, or used as far as it got.
    """
    file = Path(path)
    with file.open("rb") as stream:
        data = stream.read(min(os.fstat(stream.fileno()).st_size, _MOST_BYTES))
    try:
        return _parse(file, data)
    except ScheduleError as error:
        raise ParseError(f"{file} is not a flight record: {error}") from error


def _parse(path: Path, data: bytes) -> FlightLog:
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise ParseError(f"it has {len(data)} bytes and begins with {data[: len(MAGIC)]!r}")
    _, version, capacity, rank, stages, process, wall, clock, host, schedule = HEADER.unpack_from(
        data
    )
    if version != VERSION:
        raise ParseError(f"its version must be {VERSION} (got {version})")
    if not 2 <= capacity <= MOST_RECORDS or not 1 <= stages <= MOST_STAGES:
        raise ParseError(f"it has impossible sizes (stages: {stages}, records: {capacity})")
    first = HEADER.size + SIGNS.size + 4 * stages
    size = first + capacity * RECORD.size
    if len(data) != size:
        raise ParseError(f"it must have {size} bytes, as its header says (got {len(data)})")
    holders = np.frombuffer(data, "<u4", stages, HEADER.size + SIGNS.size)
    placement = _placement(holders, rank)
    heard, closed = SIGNS.unpack_from(data, HEADER.size)
    for moment in (wall, clock, heard, closed):
        if not 0 <= moment < LATEST:
            raise ParseError(f"{moment} is not a valid time")
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
        raise ParseError(f"a name in it is not valid text: {error}") from error
    if not name.isprintable():
        raise ParseError(f"a name in it cannot be printed: {name!r}")
    return name
