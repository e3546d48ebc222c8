"""Flight records of several ranks together show who waited for whom last."""

from pathlib import Path

import pytest

from penstock.assembly import build, lower
from penstock.errors import ArgumentError, ParseError
from penstock.files.flight.log import FlightRecord, Phase
from penstock.files.flight.waits import Cause, Flight, Reason, read_flights
from penstock.ir.placement import Placement
from penstock.schedules.registry import FAMILIES
from tests.files.flight.flights import action, ended, run_until_stuck, write_file

LOOP = Placement.loop(3)


def waiting(text: str, message: str, *, since: float = 9.0, step: int = 1) -> FlightRecord:
    return FlightRecord(step, action(text), since, action(message), since)


def flight_of(folder: Path, *ranks: list[FlightRecord]) -> Flight:
    """Write and read the records of ranks that all live until second 20."""
    for rank, records in enumerate(ranks):
        write_file(folder, rank, records, placement=LOOP, heard=20.0)
    return read_flights([folder])


def test_a_chain_of_waits_ends_at_the_rank_that_waits_for_nobody(tmp_path: Path) -> None:
    flight = flight_of(
        tmp_path,
        [waiting("0B0", "0RECV_B0")],
        [waiting("1B0", "1RECV_B0")],
        [FlightRecord(1, action("2B0"), 8.0)],
    )
    assert flight.causes == (Cause(Reason.BUSY, (2,), (0, 1)),)
    assert flight.chain(0) == (0, 1, 2)


def test_a_cycle_is_named(tmp_path: Path) -> None:
    flight = flight_of(
        tmp_path,
        [waiting("0B0", "0RECV_B0")],
        [waiting("1F1", "1RECV_F1")],
        [waiting("2F1", "2RECV_F1")],
    )
    assert flight.causes == (Cause(Reason.CYCLE, (0, 1), (2,)),)


def test_a_message_that_was_sent_and_did_not_come_is_a_link(tmp_path: Path) -> None:
    flight = flight_of(
        tmp_path,
        [*ended("0F0 0SEND_F0"), waiting("0B0", "0RECV_B0")],
        [waiting("1F0", "1RECV_F0")],
        [waiting("2F0", "2RECV_F0")],
    )
    assert flight.causes == (Cause(Reason.LINK, (0, 1), (0, 1, 2)),)
    assert flight.sent_at(1) == 1_000_002.0


def test_a_message_of_another_step_was_not_sent(tmp_path: Path) -> None:
    flight = flight_of(
        tmp_path,
        [*ended("0F0 0SEND_F0", step=0), FlightRecord(1, action("0F0"), 8.0)],
        [waiting("1F0", "1RECV_F0")],
        [waiting("2F0", "2RECV_F0")],
    )
    assert flight.causes == (Cause(Reason.BUSY, (0,), (1, 2)),)


def test_a_rank_that_fell_silent_ends_the_chain_though_it_waited_itself(tmp_path: Path) -> None:
    write_file(tmp_path, 0, [waiting("0B0", "0RECV_B0")], placement=LOOP, closed=20.0)
    write_file(tmp_path, 1, [waiting("1F1", "1RECV_F1")], placement=LOOP, heard=10.0)
    write_file(tmp_path, 2, [waiting("2F1", "2RECV_F1")], placement=LOOP, closed=20.0)
    flight = read_flights([tmp_path])
    assert flight.silent == {1}
    assert flight.causes == (Cause(Reason.SILENT, (1,), (0, 2)),)


def test_without_a_fault_silence_is_a_matter_of_seconds(tmp_path: Path) -> None:
    for rank, heard in enumerate((20.0, 19.0, 14.0)):
        write_file(tmp_path, rank, ended(f"{rank}F0"), placement=LOOP, heard=heard)
    assert read_flights([tmp_path]).silent == {2}


def test_meetings_wait_for_the_one_that_is_furthest_behind(tmp_path: Path) -> None:
    flight = flight_of(
        tmp_path,
        [*ended("0F0"), FlightRecord(1, Phase.OUTCOME, 9.0)],
        [*ended("1F0"), FlightRecord(1, Phase.OUTCOME, 9.0)],
        [FlightRecord(0, Phase.OUTCOME, 1.0, end=2.0)],
    )
    assert flight.causes == (Cause(Reason.OUTSIDE, (2,), (0, 1)),)


def test_a_meeting_of_all_that_does_not_end_is_named(tmp_path: Path) -> None:
    flight = flight_of(tmp_path, *([FlightRecord(1, Phase.AGREEMENT, 9.0)] for _ in range(3)))
    assert flight.causes == (Cause(Reason.MEETING, (0, 1, 2), ()),)


def test_ranks_without_a_record_are_missing(tmp_path: Path) -> None:
    flight = flight_of(
        tmp_path, [FlightRecord(1, Phase.OUTCOME, 9.0)], [waiting("1B0", "1RECV_B0")]
    )
    assert flight.missing == (2,)
    assert flight.causes == (Cause(Reason.MISSING, (2,), (0, 1)),)


@pytest.mark.parametrize("name", [*FAMILIES])
def test_whoever_stops_is_found_from_every_rank(name: str, tmp_path: Path) -> None:
    # Each rank runs its list until it needs what the stopped rank has not made.
    schedule = lower(build(name, ranks=4, microbatches=8))
    for victim in range(4):
        for rank, records in enumerate(run_until_stuck(schedule, victim)):
            write_file(
                tmp_path, rank, records, placement=schedule.placement, heard=20.0, capacity=512
            )
        flight = read_flights([tmp_path])
        held_up = tuple(rank for rank in range(4) if rank != victim)
        assert flight.causes == (Cause(Reason.BUSY, (victim,), held_up),)


def test_folders_and_files_of_one_pipeline_are_read_together(tmp_path: Path) -> None:
    paths = [write_file(tmp_path, rank, [], placement=LOOP) for rank in range(3)]
    assert list(read_flights([tmp_path]).logs) == [0, 1, 2]
    assert list(read_flights([paths[2], paths[0]]).logs) == [0, 2]


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one = write_file(tmp_path, 0, [], placement=LOOP)
    other = write_file(tmp_path / "other", 1, [], placement=Placement.loop(2))
    with pytest.raises(ParseError) as caught:
        read_flights([one, other])
    assert str(caught.value) == f"{other} and {one} are of different pipelines"
    with pytest.raises(ParseError) as caught:
        read_flights([one, one])
    assert str(caught.value) == f"{one} and {one} are both of rank 0"


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        read_flights([tmp_path])
    assert str(caught.value) == (
        f"{tmp_path} must have flight records, files that end with .flight (got none)"
    )


def test_a_thousand_ranks_are_understood(tmp_path: Path) -> None:
    placement = Placement.loop(1000)
    for rank in range(999):
        record = waiting(f"{rank}B0", f"{rank}RECV_B0")
        write_file(tmp_path, rank, [record], placement=placement, closed=20.0, capacity=4)
    write_file(tmp_path, 999, [], placement=placement, heard=10.0, capacity=4)
    flight = read_flights([tmp_path])
    assert flight.causes == (Cause(Reason.SILENT, (999,), tuple(range(999))),)
    assert flight.chain(0) == tuple(range(1000))
