"""The last step of flight records is a timeline of what was really done."""

from pathlib import Path

import pytest

from penstock.assembly import build, lower
from penstock.files.flight.log import FlightRecord, Phase
from penstock.files.flight.timeline import RecordedStep, last_recorded_step
from penstock.files.flight.waits import read_flights
from penstock.ir.actions import Action
from penstock.ir.placement import Placement
from penstock.schedules.registry import FAMILIES
from penstock.sim.waits import find_waits
from penstock.view.html.page import page
from penstock.view.text.timeline import plain_timeline
from tests.files.flight.flights import action, ended, run_until_stuck, write_file

LOOP = Placement.loop(2)


def recorded(folder: Path) -> RecordedStep:
    step = last_recorded_step(read_flights([folder]))
    assert step is not None
    return step


def spans(step: RecordedStep) -> list[list[tuple[str, float, float]]]:
    timeline = step.timeline
    return [
        [(str(span.action), span.start, span.end) for span in timeline.spans(rank)]
        for rank in range(timeline.schedule.num_ranks)
    ]


def test_actions_are_drawn_from_when_their_messages_came_to_their_end(tmp_path: Path) -> None:
    late = FlightRecord(4, action("1F0"), 1.0, action("1RECV_F0"), 1.0, 2.5, 3.0)
    write_file(tmp_path, 0, ended("0F0 0SEND_F0", step=4), placement=LOOP)
    write_file(tmp_path, 1, [late], placement=LOOP)
    step = recorded(tmp_path)
    assert (step.step, step.unfinished) == (4, ())
    assert spans(step) == [[("0F0", 0.0, 1.0)], [("1F0", 1.5, 2.0)]]
    assert step.timeline.schedule.name == "mine, step 4"


def test_what_was_under_way_is_drawn_to_the_end(tmp_path: Path) -> None:
    write_file(tmp_path, 0, [FlightRecord(0, action("0F0"), 1.0)], placement=LOOP, heard=7.0)
    done = ended("1F0 1F1 1F2 1F3", start=2.0, step=0)
    write_file(tmp_path, 1, done, placement=LOOP, closed=900.0)
    step = recorded(tmp_path)
    assert step.unfinished == (action("0F0"),)
    assert spans(step)[0] == [("0F0", 0.0, 6.25)]


def test_an_end_that_comes_soon_is_the_end_of_the_picture(tmp_path: Path) -> None:
    records = [*ended("0F0 0F1 0F2", step=0), FlightRecord(0, action("0B0"), 4.0)]
    write_file(tmp_path, 0, records, placement=LOOP, closed=4.5)
    assert spans(recorded(tmp_path))[0][-1] == ("0B0", 3.0, 3.5)


def test_what_is_alone_in_its_step_is_drawn_to_the_end_of_the_records(tmp_path: Path) -> None:
    write_file(tmp_path, 0, [FlightRecord(0, action("0F0"), 1.0)], placement=LOOP, closed=9.0)
    assert spans(recorded(tmp_path)) == [[("0F0", 0.0, 8.0)], [("1F0", 8.0, 8.0)]]


def test_failed_work_is_drawn_until_its_rank_continued(tmp_path: Path) -> None:
    records = [FlightRecord(0, action("0F0"), 1.0), *ended("0SEND_F0", start=3.0, step=0)]
    write_file(tmp_path, 0, records, placement=LOOP)
    step = recorded(tmp_path)
    assert (step.unfinished, spans(step)[0]) == ((action("0F0"),), [("0F0", 0.0, 2.0)])


def test_what_still_waits_has_not_begun(tmp_path: Path) -> None:
    waiting = FlightRecord(0, action("1F0"), 1.0, action("1RECV_F0"), 1.0)
    write_file(tmp_path, 0, ended("0F0", step=0), placement=LOOP)
    write_file(tmp_path, 1, [waiting], placement=LOOP, closed=9.0)
    step = recorded(tmp_path)
    assert step.unfinished == ()
    assert spans(step) == [[("0F0", 0.0, 1.0)], [("1F0", 1.25, 1.25)]]


def test_ranks_without_a_record_have_an_empty_lane(tmp_path: Path) -> None:
    write_file(tmp_path, 1, ended("1F0 1B0 1F1 1B1"), placement=LOOP)
    step = recorded(tmp_path)
    picture = plain_timeline(step.timeline, width=28).plain.splitlines()
    assert picture[:2] == ["rank 0  ....................", "rank 1  F0---B0---F1---B1---"]


def test_of_a_step_that_was_tried_again_the_last_attempt_is_drawn(tmp_path: Path) -> None:
    records = [*ended("0F0 0F1 0B0"), *ended("0F0 0F1", start=5.0)]
    write_file(tmp_path, 0, records, placement=LOOP)
    assert spans(recorded(tmp_path))[0] == [("0F0", 0.0, 1.0), ("0F1", 1.0, 2.0)]


def test_backwards_whose_forwards_were_written_over_are_left_out(tmp_path: Path) -> None:
    records = ended("0F0 0F1 0F2 0B0 0B1 0B2")
    write_file(tmp_path, 0, records, placement=LOOP, capacity=5)
    assert [text for text, *_ in spans(recorded(tmp_path))[0]] == ["0F2", "0B2"]


def test_records_without_compute_give_no_step(tmp_path: Path) -> None:
    write_file(tmp_path, 0, [FlightRecord(0, Phase.AGREEMENT, 1.0)], placement=LOOP)
    write_file(tmp_path, 1, [], placement=LOOP)
    assert last_recorded_step(read_flights([tmp_path])) is None


@pytest.mark.parametrize("name", [*FAMILIES])
def test_half_a_step_of_every_family_can_be_drawn(name: str, tmp_path: Path) -> None:
    schedule = lower(build(name, ranks=4, microbatches=8))
    for rank, records in enumerate(run_until_stuck(schedule, 1)):
        write_file(tmp_path, rank, records, placement=schedule.placement, capacity=512)
    step = recorded(tmp_path)
    rows = step.timeline.schedule.rows
    seen: set[Action] = {rows.action(row) for row in range(len(rows))}
    assert seen < {schedule.rows.action(row) for row in range(len(schedule.rows))}
    # All that was done is known, and so is what it had needed.
    assert step.timeline.schedule.dataflow.edges == schedule.dataflow.edges
    assert len(find_waits(step.timeline).graph.need) >= len(rows) / 2
    assert page(step.timeline).startswith("<!doctype html>")


@pytest.mark.parametrize("missing", range(4))
@pytest.mark.parametrize("name", ["1F1B", "ZBV", "DualPipe"])
def test_half_a_step_can_be_drawn_without_one_rank(
    name: str, missing: int, tmp_path: Path
) -> None:
    schedule = lower(build(name, ranks=4, microbatches=8))
    for rank, records in enumerate(run_until_stuck(schedule, 2)):
        if rank != missing:
            write_file(tmp_path, rank, records, placement=schedule.placement, capacity=512)
    assert page(recorded(tmp_path).timeline).startswith("<!doctype html>")
