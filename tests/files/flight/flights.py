"""Flight records with times that a test has chosen, as tables and as files."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from penstock.files.flight.layout import HEADER, MAGIC, RECORD, SIGNS, VERSION
from penstock.files.flight.log import FlightRecord, Phase
from penstock.files.flight.record_file import FlightWriter, flight_path
from penstock.ir.actions import Action, Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.ir.text import parse_work

__all__ = ["BEGAN", "action", "ended", "run_until_stuck", "write_file"]

# The wall clock when the records begin; the times of tests count from here.
BEGAN = 1_000_000.0
_CLOCK = 100.0


def action(text: str) -> Action:
    """Return the action that a text describes."""
    work = parse_work(text)
    assert isinstance(work, Action)
    return work


def ended(
    texts: str, *, start: float = 1.0, seconds: float = 1.0, step: int = 1
) -> list[FlightRecord]:
    """Actions that followed one another without a gap."""
    return [
        FlightRecord(step, action(text), start + n * seconds, end=start + (n + 1) * seconds)
        for n, text in enumerate(texts.split())
    ]


def run_until_stuck(schedule: Schedule, victim: int) -> list[list[FlightRecord]]:
    """Return the records of ranks that run a lowered schedule; one stops half-way for ever."""
    rows = schedule.rows
    bounds = zip(rows.first[:-1].tolist(), rows.first[1:].tolist(), strict=True)
    orders = [[rows.action(row) for row in range(*bound)] for bound in bounds]
    records: list[list[FlightRecord]] = [[] for _ in orders]
    computes = [place for place, work in enumerate(orders[victim]) if work.kind.is_compute]
    stop = computes[len(computes) // 2]
    sent: set[Action] = set()
    clock = 1.0
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, order in enumerate(orders):
            place = len(records[rank])
            if place == len(order) or (rank == victim and place == stop):
                continue
            if not [m for m in _messages(schedule, order[place]) if _send_of(m) not in sent]:
                sent.add(order[place])
                clock += 0.01
                records[rank].append(FlightRecord(1, order[place], clock, end=clock))
                has_moved = True
    for rank, order in enumerate(orders):
        place = len(records[rank])
        if place == len(order):
            records[rank].append(FlightRecord(1, Phase.OUTCOME, 19.0))
            continue
        missing = [m for m in _messages(schedule, order[place]) if _send_of(m) not in sent]
        wait = (missing[0], 19.0) if missing else ()
        records[rank].append(FlightRecord(1, order[place], 19.0, *wait))
    return records


def _messages(schedule: Schedule, work: Action) -> list[Action]:
    """Return the receives that an action waits for."""
    flow, holder = schedule.dataflow, schedule.placement.rank_of_stage
    match work.kind:
        case Kind.FORWARD:
            peers, kind = flow.producers(work.stage), Kind.RECV_F
        case Kind.FULL_BACKWARD | Kind.BACKWARD_INPUT:
            peers, kind = flow.consumers(work.stage), Kind.RECV_B
        case _:
            return []
    return [
        Action(kind, work.stage, work.microbatch, peer)
        for peer in peers
        if holder[peer] != holder[work.stage]
    ]


def _send_of(receive: Action) -> Action:
    assert receive.peer is not None
    kind = Kind.SEND_F if receive.kind is Kind.RECV_F else Kind.SEND_B
    return Action(kind, receive.peer, receive.microbatch, receive.stage)


def write_file(
    folder: Path,
    rank: int,
    records: Iterable[FlightRecord],
    *,
    placement: Placement,
    heard: float | None = None,
    closed: float | None = None,
    capacity: int = 64,
    schedule: str = "mine",
) -> Path:
    """Write a file as a writer would leave it, with times in seconds from `BEGAN`."""
    names = (b"here", schedule.encode())
    sizes = (VERSION, capacity, rank, placement.num_stages, 4000 + rank)
    header = HEADER.pack(MAGIC, *sizes, BEGAN, _CLOCK, *names)
    signs = SIGNS.pack(*(_CLOCK + time if time else 0.0 for time in (heard, closed)))
    stages = np.array(placement.rank_of_stage, dtype="<u4").tobytes()
    ring = bytearray(capacity * RECORD.size)
    for number, record in enumerate(records):
        place = number % capacity * RECORD.size
        RECORD.pack_into(ring, place, *_fields(record), number + 1)
    path = flight_path(folder, rank)
    path.write_bytes(header + signs + stages + bytes(ring))
    return path


def _fields(record: FlightRecord) -> tuple[int, float, bytes, bytes, float, float, float]:
    times = (record.waiting_since, record.ready, record.end)
    since, ready, end = (0.0 if time is None else _CLOCK + time for time in times)
    awaited = bytes(16) if record.waiting_for is None else FlightWriter.encode(record.waiting_for)
    doing = FlightWriter.encode(record.doing)
    return record.step, _CLOCK + record.start, doing, awaited, since, ready, end
