"""The schedule as a value, and its CSV files."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from penstock.assembly import build, lower
from penstock.errors import ParseError, ScheduleError
from penstock.ir.actions import Action, Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from tests.strategies import dag_schedules, every_family, schedules
from tests.tables import orders_of, read_schedule

V = """
    0F0 3F0 3B0 0B0
    1F0 2F0 2B0 1B0
"""


def test_placement_and_microbatches_are_read_off_the_orders() -> None:
    schedule = read_schedule(V)
    assert schedule.placement == Placement.v(2)
    assert schedule.dataflow == Dataflow.chain(4)
    assert (schedule.num_ranks, schedule.num_stages, schedule.microbatches) == (2, 4, 1)
    assert schedule.name == "custom"


def test_orders_come_out_as_they_went_in() -> None:
    schedule = read_schedule("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert orders_of(schedule) == [["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]]
    assert schedule.orders == (schedule.order(0),)
    assert Schedule.from_orders(schedule.orders) == schedule


def test_schedules_are_equal_when_all_but_their_names_are() -> None:
    schedule = read_schedule(V)
    assert schedule == replace(schedule, name="other")
    assert hash(schedule) == hash(replace(schedule, name="other"))
    assert schedule != read_schedule(V.replace("3B0 0B0", "0B0 3B0"))
    assert schedule != replace(schedule, microbatches=2)
    assert schedule != V


def test_questions_about_what_a_schedule_holds() -> None:
    plain = build("1F1B", ranks=2, microbatches=2)
    assert not plain.has_communication
    assert lower(plain).has_communication
    assert not plain.is_forward_only
    assert build("ForwardOnly", ranks=2, microbatches=2).is_forward_only


def test_columns_cannot_be_written_to() -> None:
    rows = build("1F1B", ranks=2, microbatches=2).rows
    for column in (rows.first, *rows.columns):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


@given(schedules())
def test_csv_gives_back_the_schedule(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule
) -> None:
    file = tmp_path_factory.mktemp("csv") / "schedule.csv"
    schedule.to_csv(file)
    assert Schedule.from_csv(file) == schedule


@given(dag_schedules())
def test_csv_gives_back_a_schedule_with_skips(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule
) -> None:
    file = tmp_path_factory.mktemp("csv") / "schedule.csv"
    schedule.to_csv(file)
    assert Schedule.from_csv(file) == schedule


def test_csv_gives_back_the_lowered_schedule_of_every_family(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    for schedule in every_family(4, 6):
        lowered = lower(schedule)
        lowered.to_csv(file)
        assert Schedule.from_csv(file) == lowered


def test_csv_holds_one_line_per_rank_and_takes_its_name_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    read_schedule(V).to_csv(file)
    assert file.read_text() == "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
    assert Schedule.from_csv(str(file)).name == "mine"


def test_two_directions_are_written_with_their_dataflow(tmp_path: Path) -> None:
    file = tmp_path / "both.csv"
    build("DualPipe", ranks=2, microbatches=2).to_csv(file)
    assert file.read_text() == (
        "# dataflow: 0>1 2>3 | parts: 0 1 0 1\n0F0,3F1,3B1,0B0\n2F1,1F0,1B0,2B1\n"
    )


def test_empty_cells_and_blanks_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "gaps.csv"
    file.write_text("0F0,,,\t, 0B0 ,\n,1F0,1B0\n\n  \n")
    assert Schedule.from_csv(file) == read_schedule("0F0 0B0\n1F0 1B0")


def test_ragged_lines_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "ragged.csv"
    file.write_text("0F0,0F1\n1F0,1B0,1F1,1B1")
    assert orders_of(Schedule.from_csv(file)) == [["0F0", "0F1"], ["1F0", "1B0", "1F1", "1B1"]]


def test_csv_as_torch_writes_it_is_read(tmp_path: Path) -> None:
    # Torch hands its lists to `csv.writer`: lines end in CR LF, None becomes an empty cell.
    file = tmp_path / "torch.csv"
    table = [["0F0", "0F1", None, "0B0", None, "0B1"], [None, "1F0", "1B0", "1F1", "1B1"]]
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows(table)
    assert file.read_bytes().startswith(b"0F0,0F1,,0B0,,0B1\r\n")
    assert Schedule.from_csv(file) == read_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", ParseError, "the file is empty; write one line per rank, one action per cell"),
        (b" \n\n", ParseError, "the file is empty; write one line per rank, one action per cell"),
        (
            b"# dataflow: 0>1 | parts: 0 1\n",
            ParseError,
            "the file is empty; write one line per rank, one action per cell",
        ),
        (b'0F0,"0B0\n', ParseError, "not a CSV file: unexpected end of data"),
        (
            b"0F0,0B0\n1F0,1F0garbage\n",
            ParseError,
            "rank 1, cell 1: not a valid action: '1F0garbage' "
            "(expected STAGE KIND MICROBATCH, e.g. 2F0)",
        ),
        (
            b"0F0,,\x00\n",
            ParseError,
            "rank 0, cell 2: not a valid action: '\\x00' "
            "(expected STAGE KIND MICROBATCH, e.g. 2F0)",
        ),
        (
            b"0UNSHARD\n",
            ScheduleError,
            "the schedule has no compute action; add forwards such as 0F0",
        ),
        (
            b"0F0,0F1\n2F0,2F1\n",
            ScheduleError,
            "stage 1 never computes, but stage 2 does; number the stages from 0 without gaps",
        ),
        (
            b"0F0,0B0\n1F0,0F1,1B0\n",
            ScheduleError,
            "rank 0, position 0, 0F0: stage 0 also runs on rank 1; a stage must be on one rank",
        ),
        (b"0F0\n\n1F0\n", ScheduleError, "rank 1 computes nothing; give every rank a stage"),
        # Numbers are bounded by the number of actions before anything of their size is made.
        (
            b"0F0,999999999F0\n",
            ScheduleError,
            "stage 999999999 is named, but there are only 2 actions; "
            "number the stages from 0 without gaps",
        ),
        (
            b"0F0,0F999999999\n",
            ScheduleError,
            "microbatch 999999999 is named, but there are only 2 actions; "
            "number the microbatches from 0 without gaps",
        ),
        (
            b"# dataflow: 1>0 | parts: 0 1\n0F0\n1F0\n",
            ScheduleError,
            "an edge must go from a lower to a higher stage below 2 (got 1 > 0)",
        ),
        (
            b"# dataflow: 0>1 1>2 | parts: 0 1 2\n0F0\n1F0\n",
            ScheduleError,
            "orders, placement and dataflow differ in size (ranks: 2 and 2, stages: 3 and 2)",
        ),
        (
            b"# dataflow: 0>1 | parts: 0 999999999\n0F0\n1F0\n",
            ScheduleError,
            "parts must be numbered from 0 without gaps (got 999999999 for 2 stages)",
        ),
    ],
)
def test_csv_that_holds_no_schedule_is_refused(
    tmp_path: Path, content: bytes, error: type[ScheduleError], message: str
) -> None:
    file = tmp_path / "bad.csv"
    file.write_bytes(content)
    with pytest.raises(error) as caught:
        Schedule.from_csv(file)
    assert type(caught.value) is error
    assert str(caught.value) == f"{file}: {message}"


def test_few_actions_that_name_a_huge_grid_are_refused() -> None:
    # Checks hold a table of stages by microbatches; 20,000 actions once made one of 100 million.
    orders = [[*(f"{stage}F0" for stage in range(2000)), *(f"0F{m}" for m in range(1, 2000))]]
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_orders(orders)
    assert str(caught.value) == (
        "2000 stages and 2000 microbatches are named, but there are only 3999 actions; "
        "number both from 0 without gaps"
    )


def test_binary_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "picture.csv"
    file.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ParseError) as caught:
        Schedule.from_csv(file)
    assert str(caught.value) == (
        f"{file}: not a text file: byte 0 is not UTF-8 (invalid start byte)"
    )


def test_parts_of_different_sizes_are_refused() -> None:
    schedule = read_schedule(V)
    with pytest.raises(ScheduleError) as caught:
        replace(schedule, placement=Placement.loop(4))
    assert str(caught.value) == (
        "orders, placement and dataflow differ in size (ranks: 2 and 4, stages: 4 and 4)"
    )


def test_orders_take_actions_and_text_alike() -> None:
    action = Action(Kind.FORWARD, 0, 0)
    assert Schedule.from_orders([[action, "0B0"]]) == Schedule.from_orders([["0F0", "0B0"]])
