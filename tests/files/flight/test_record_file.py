"""Flight records come back as they were written, whatever ended the process that wrote them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ArgumentError, ParseError
from penstock.files.flight.layout import HEADER, MOST_MICROBATCHES, RECORD, SIGNS, TIME
from penstock.files.flight.log import FlightRecord, Phase, spell_out
from penstock.files.flight.record_file import FlightWriter, flight_path, read_flight
from penstock.ir.actions import Action, Kind
from penstock.ir.placement import Placement
from tests.files.flight.flights import BEGAN, action, ended, write_file
from tests.strategies import examples

LOOP = Placement.loop(4)
HEAD = HEADER.size + SIGNS.size + 4 * LOOP.num_stages


def writer_of(folder: Path, rank: int = 2, capacity: int = 64) -> FlightWriter:
    return FlightWriter(
        flight_path(folder, rank), rank=rank, placement=LOOP, schedule="1F1B", capacity=capacity
    )


def do(writer: FlightWriter, *texts: str) -> None:
    for text in texts:
        writer.start(writer.encode(action(text)))
        writer.end()


def own_actions() -> st.SearchStrategy[Action]:
    numbers = st.integers(0, MOST_MICROBATCHES - 1)
    plain = st.builds(
        Action, st.sampled_from([k for k in Kind if k.is_compute]), st.just(2), numbers
    )
    whole = st.builds(
        Action, st.sampled_from([k for k in Kind if not k.has_microbatch]), st.just(2)
    )
    messages = st.builds(
        Action,
        st.sampled_from([k for k in Kind if k.is_communication]),
        st.just(2),
        numbers,
        st.integers(0, 3),
    )
    return plain | whole | messages


@given(
    doings=st.lists(own_actions() | st.sampled_from(Phase), max_size=40),
    capacity=st.integers(2, 20),
)
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_newest_records_come_back_in_order(
    doings: list[Action | Phase], capacity: int, tmp_path: Path
) -> None:
    writer = writer_of(tmp_path, capacity=capacity)
    for number, doing in enumerate(doings):
        writer.begin_step(number)
        writer.start(writer.encode(doing))
        writer.end()
    found = read_flight(writer.path).records
    kept = list(enumerate(doings))[-(capacity - 1) :]
    assert [(record.step, record.doing) for record in found] == kept
    assert None not in [record.end for record in found]
    times = [time for record in found for time in (record.start, record.end or 0.0)]
    assert times == sorted(times)


def test_an_action_that_follows_another_begins_when_that_ends(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, capacity=3)
    writer.start(writer.encode(action("2F0")))
    for text in ("2F1", "2B0", "2B1"):
        writer.follow(writer.encode(action(text)))
    first, last = read_flight(writer.path).records
    assert (str(first.doing), str(last.doing)) == ("2B0", "2B1")
    assert (first.end, last.end) == (last.start, None)


def test_a_log_knows_who_wrote_it(tmp_path: Path) -> None:
    before = time.time()
    writer = writer_of(tmp_path)
    log = read_flight(writer.path)
    assert (log.rank, log.num_ranks, log.placement) == (2, 4, LOOP)
    assert (log.schedule, log.process, log.records, log.last) == ("1F1B", os.getpid(), (), None)
    assert (log.heard, log.closed) == (None, None)
    assert before <= log.began <= time.time()


def test_signs_of_life_are_read_back(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.beat()
    writer.close(keep=True)
    log = read_flight(writer.path)
    assert log.heard is not None
    assert log.closed is not None
    assert log.began <= log.heard <= log.closed == log.last_time


def test_a_record_that_is_not_kept_is_removed(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.close(keep=False)
    assert list(tmp_path.iterdir()) == []
    do(writer, "2F0")
    writer.beat()
    writer.close(keep=False)


def test_waits_are_recorded_until_they_end(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.start(writer.encode(action("2F0")))
    writer.wait(writer.encode(action("2RECV_F0")))
    waiting = read_flight(writer.path).last
    writer.arrived()
    ready = read_flight(writer.path).last
    assert waiting is not None
    assert ready is not None
    assert (waiting.waiting_for, waiting.is_waiting) == (action("2RECV_F0"), True)
    assert (ready.waiting_for, ready.is_waiting) == (action("2RECV_F0"), False)
    writer.wait(writer.encode(action("2SEND_B0")))
    again = read_flight(writer.path).last
    assert again is not None
    assert (again.waiting_for, again.is_waiting, again.ready) == (action("2SEND_B0"), True, None)


@pytest.mark.parametrize(
    ("doing", "words"),
    [
        (action("2B3"), "2B3 (backward of microbatch 3 in stage 2)"),
        (action("2UNSHARD"), "2UNSHARD (gathering the weights in stage 2)"),
        (Phase.OUTCOME, "the meeting after the step"),
    ],
)
def test_actions_and_phases_are_described_in_words(doing: Action | Phase, words: str) -> None:
    assert spell_out(doing) == words


def test_times_of_a_file_are_of_the_wall_clock(tmp_path: Path) -> None:
    record = FlightRecord(3, action("2F0"), 1.0, action("2RECV_F0"), 1.5, 2.0, 3.0)
    path = write_file(tmp_path, 2, [record], placement=LOOP, heard=3.5, closed=4.0)
    log = read_flight(path)
    assert (log.began, log.heard, log.closed) == (BEGAN, BEGAN + 3.5, BEGAN + 4.0)
    times = (BEGAN + 1.5, BEGAN + 2.0, BEGAN + 3.0)
    assert log.records == (
        FlightRecord(3, action("2F0"), BEGAN + 1.0, action("2RECV_F0"), *times),
    )


def test_clock_offsets_shift_all_times(tmp_path: Path) -> None:
    path = flight_path(tmp_path, 0)
    FlightWriter(path, rank=0, placement=LOOP, clock_offset_seconds=-1000.0)
    assert read_flight(path).began < time.time() - 900


KILLED = """
import os, signal, sys
from penstock.ir.placement import Placement
from penstock.ir.text import parse_work
from penstock.files.flight.record_file import FlightWriter
writer = FlightWriter(sys.argv[1], rank=2, placement=Placement.loop(4), capacity=8)
for microbatch in range(100):
    writer.begin_step(microbatch)
    writer.start(writer.encode(parse_work(f"2F{microbatch}")))
    writer.wait(writer.encode(parse_work(f"2RECV_F{microbatch}")))
    if microbatch == 99:
        os.kill(os.getpid(), signal.SIGKILL)
    writer.arrived()
    writer.end()
"""


def test_a_killed_process_leaves_its_record(tmp_path: Path) -> None:
    path = tmp_path / "killed.flight"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    log = read_flight(path)
    assert [str(record.doing) for record in log.records] == [f"2F{n}" for n in range(93, 100)]
    last = log.last
    assert last is not None
    assert (last.step, last.is_waiting, last.waiting_for) == (99, True, action("2RECV_F99"))
    assert log.process != os.getpid()


@pytest.mark.parametrize("num_records", [3, 7, 8, 20])
def test_a_record_cut_off_while_it_is_begun_is_left_out(num_records: int, tmp_path: Path) -> None:
    writer = writer_of(tmp_path, capacity=8)
    do(writer, *(f"2F{n}" for n in range(num_records)))
    whole = read_flight(writer.path).records
    before = writer.path.read_bytes()
    do(writer, "2B0")
    after = writer.path.read_bytes()
    begin = HEAD + num_records % 8 * RECORD.size
    # Its number, of which one byte counts here, is the last thing that is written.
    for cut in range(RECORD.size - 7):
        writer.path.write_bytes(after[: begin + cut] + before[begin + cut :])
        assert read_flight(writer.path).records == whole


def test_a_time_cut_off_in_the_newest_record_has_not_come(tmp_path: Path) -> None:
    record = FlightRecord(1, action("2F0"), 1.0, action("2RECV_F0"), 1.5, 2.0, 3.0)
    path = write_file(tmp_path, 2, [*ended("2F1", start=0.5, seconds=0.1), record], placement=LOOP)
    data = path.read_bytes()
    found = set()
    for end in range(TIME.size + 1):
        at = HEAD + RECORD.size + 64 + end
        path.write_bytes(data[:at] + bytes(TIME.size - end) + data[at + TIME.size - end :])
        last = read_flight(path).last
        assert last is not None
        found.add(last.end)
    assert {None, BEGAN + 3.0} <= found
    assert all(time is None or time >= BEGAN + 1.0 for time in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, b"NOFLIGHT"), "it has 5328 bytes and begins with b'NOFLIGHT'"),
        ((8, b"\2"), "its version must be 1 (got 2)"),
        ((12, b"\1\0"), "it has impossible sizes (stages: 4, records: 1)"),
        ((12, b"\0\0\0\xff"), "it has impossible sizes (stages: 4, records: 4278190080)"),
        ((20, b"\0\0\0\xff"), "it has impossible sizes (stages: 4278190080, records: 64)"),
        ((12, b"\x41"), "it must have 5408 bytes, as its header says (got 5328)"),
        ((16, b"\4"), "rank 4 holds none of its 4 stages"),
        ((HEAD - 4, b"\7"), "rank 7 holds none of its 4 stages"),
        ((32, b"\0\0\0\0\0\0\xf0\x7f"), "inf is not a valid time"),
        ((48, b"\x1b[2J"), "a name in it cannot be printed: '\\x1b[2J'"),
        (
            (48, b"\xff"),
            "a name in it is not valid text: 'utf-8' codec can't decode byte 0xff in position 0: "
            "invalid start byte",
        ),
        ((HEAD, b"\xff" * 8), "the step of record 1 is impossible"),
        ((HEAD + 16, b"\x0e"), "the action of record 1 is impossible"),
        ((HEAD + 20, b"\1"), "the action of record 1 is impossible"),
        ((HEAD + 24, b"\xff\xff\xff\xff"), "the action of record 1 is impossible"),
        # Tables of a cell per microbatch took more memory than there was.
        ((HEAD + 24, b"\0\0\1\0"), "the action of record 1 is impossible"),
        ((HEAD + 28, b"\1\0\0\0"), "the action of record 1 is impossible"),
        ((HEAD + 48, b"\0\0\0\0\0\0\0\0"), "the arrival of record 1 is impossible"),
        ((HEAD + 64, b"\0\0\0\0\0\0\xf0\x7f"), "the end of record 1 is impossible"),
        ((HEAD + 72, b"\7"), "record 7 is in the place of record 1"),
        ((HEAD + 72, b"\xff" * 7 + b"\x7f"), "9223372036854775807 is not a valid record number"),
    ],
)
def test_invalid_flight_record_is_refused(
    change: tuple[int, bytes], message: str, tmp_path: Path
) -> None:
    record = FlightRecord(1, action("2F0"), 1.0, action("2RECV_F0"), 1.5, 2.0, 3.0)
    path = write_file(tmp_path, 2, [record, *ended("2F1", start=4.0)], placement=LOOP)
    data = bytearray(path.read_bytes())
    at, new = change
    data[at : at + len(new)] = new
    path.write_bytes(data)
    with pytest.raises(ParseError) as caught:
        read_flight(path)
    assert str(caught.value) == f"{path} is not a flight record: {message}"


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path, 2, ended("2F0"), placement=LOOP)
    data = path.read_bytes()
    for size in range(0, len(data), 37):
        path.write_bytes(data[:size])
        with pytest.raises(ParseError, match=rf"is not a flight record: .*\b{size}\b"):
            read_flight(path)


CHANGES = st.lists(
    st.tuples(st.integers(0, 1000), st.binary(min_size=1, max_size=16)), min_size=1, max_size=3
)
FUZZING = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(changes=CHANGES, num_records=st.integers(0, 10))
@settings(FUZZING, max_examples=examples(500))
def test_changed_file_is_refused_or_gives_possible_records(
    changes: list[tuple[int, bytes]], num_records: int, tmp_path: Path
) -> None:
    read_changed(changes, num_records, tmp_path)


@pytest.mark.slow
@given(changes=CHANGES, num_records=st.integers(0, 10))
@settings(FUZZING, max_examples=10_000)
def test_ten_thousand_changed_files_are_refused_or_give_possible_records(
    changes: list[tuple[int, bytes]], num_records: int, tmp_path: Path
) -> None:
    read_changed(changes, num_records, tmp_path)


def read_changed(changes: list[tuple[int, bytes]], num_records: int, folder: Path) -> None:
    texts = " ".join(f"2F{n}" for n in range(num_records))
    path = write_file(folder, 2, ended(texts), placement=LOOP, capacity=8, heard=20.0)
    data = bytearray(path.read_bytes())
    for place, new in changes:
        at = place % len(data)
        data[at : at + len(new)] = new
    path.write_bytes(data)
    try:
        log = read_flight(path)
    except ParseError:
        return
    times = [record.start for record in log.records]
    assert times == sorted(times)
    assert all(spell_out(record.doing) for record in log.records)
    assert log.last_time >= log.began


@pytest.mark.parametrize("capacity", [-1, 0, 1, 2**20 + 1])
def test_capacities_that_make_no_ring_are_refused(capacity: int, tmp_path: Path) -> None:
    message = f"capacity must be from 2 to 1048576 actions \\(got {capacity}\\)"
    with pytest.raises(ArgumentError, match=message):
        writer_of(tmp_path, capacity=capacity)


def test_long_names_are_cut_to_whole_letters(tmp_path: Path) -> None:
    path = flight_path(tmp_path, 0)
    FlightWriter(path, rank=0, placement=LOOP, schedule="ü" * 100)
    assert read_flight(path).schedule == "ü" * 32
