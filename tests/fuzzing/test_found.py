"""What fuzzing has found, one test each, with its cause."""

import json
from pathlib import Path

import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import CostsError, ParseError, PenstockError, PlanError
from penstock.files.timeline import read_timeline, write_timeline
from penstock.files.trace.reading import read_trace
from penstock.ir.schedule import Schedule
from penstock.planner.partition.pieces import Piece
from penstock.planner.plans import Plan
from penstock.planner.search.layer_files import read_layers
from penstock.sim.engine import simulate
from penstock.sim.explain import explain
from penstock.view.html.page import page
from penstock.view.notebook import timeline_html
from tests.fuzzing import valid_files
from tests.fuzzing.bounds import bounded
from tests.fuzzing.judging import check_message, judge
from tests.fuzzing.readers import READERS


def test_whole_numbers_beyond_floats_are_no_costs_of_a_layer() -> None:
    # They are smaller than infinity, and were taken; NumPy failed on them later.
    with pytest.raises(CostsError, match="forward of piece 'a' is 1000"):
        Piece("a", forward=10**400)


def test_whole_numbers_beyond_floats_are_no_limit_of_a_plan(tmp_path: Path) -> None:
    # They are numbers from 0 up, but making one a float raised an OverflowError.
    fields = json.loads(valid_files.plan_files()[0])
    (tmp_path / "plan.json").write_text(json.dumps({**fields, "memory": [10**400, None]}))
    with pytest.raises(PlanError, match="memory: a limit must be a number of bytes or null"):
        Plan.from_file(tmp_path / "plan.json")


def test_kernels_that_never_end_are_refused(tmp_path: Path) -> None:
    # Start and length were checked, but not their sum: rounding infinity raised OverflowError.
    events = json.loads(valid_files.profiler_files()[1])
    for event in events:
        event["dur"] = 1.7e308 if event["cat"] == "kernel" else event["dur"]
    (tmp_path / "trace.json").write_text(json.dumps(events))
    with pytest.raises(ParseError, match=r"event 1: dur must be .*1\.7e\+308"):
        read_trace(tmp_path / "trace.json")


@pytest.mark.parametrize("name", ["plan", "trace", "timeline", "costs-json", "layers-json"])
def test_a_name_that_stands_twice_is_found_in_linear_time(name: str, tmp_path: Path) -> None:
    # Every name was counted among all of them, which took minutes for a file of this size.
    names = ",".join(f'"{number}": 0' for number in range(50_000))
    assert not judge(READERS[name], f'{{{names}, "49999": 0}}'.encode(), tmp_path)


@pytest.mark.parametrize("name", ["costs-toml", "layers-toml"])
@pytest.mark.parametrize("part", ["a", '"#"', "'.'", "a "])
def test_keys_of_many_parts_are_refused_in_linear_time(
    name: str, part: str, tmp_path: Path
) -> None:
    # Python's reader looks at every beginning of a key, which took minutes for a file like this.
    assert not judge(READERS[name], f"{f'{part}.' * 50_000}a = 1".encode(), tmp_path)


def test_layers_are_counted_in_all(tmp_path: Path) -> None:
    # Only each layer's own count was limited; a few hundred lines asked for gigabytes.
    layer = '[[layers]]\nname = "a"\nrepeat = 99999\n'
    (tmp_path / "layers.toml").write_text(layer * 300)
    with pytest.raises(CostsError, match=r"at most 100,000 layers .'a' is beyond"):
        read_layers(tmp_path / "layers.toml")


def test_many_ranks_take_no_table_of_all_links(tmp_path: Path) -> None:
    # One transfer time was written out for every pair of ranks: here three gigabytes.
    file = tmp_path / "wide.csv"
    file.write_text("".join(f"{rank}F0\n" for rank in range(20_000)))
    with bounded(seconds=60, bytes_more=256 * 2**20):
        assert simulate(Schedule.from_csv(file)).longest_span == 1.0


@pytest.mark.parametrize("name", ["schedule", "order", "costs-toml", "plan", "timeline"])
def test_a_file_without_end_is_refused(name: str) -> None:
    # It was read until there was no memory left.
    with pytest.raises(
        PenstockError, match="/dev/zero: the file must not be longer than 268,435,456"
    ):
        READERS[name].read(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xfe0F0", "not a text file: byte 0 is not UTF-8"),
        (b"a" * 200_000, "not a CSV file: field larger than field limit"),
        (b"0F0,0X0", "rank 0, cell 1: not a valid action: '0X0'"),
    ],
)
def test_orders_of_the_dropin_are_refused_by_name(
    data: bytes, reason: str, tmp_path: Path
) -> None:
    # Errors of the decoder and of Python's CSV reader came through as they were.
    file = tmp_path / "order.csv"
    file.write_bytes(data)
    with pytest.raises(ParseError) as caught:
        READERS["order"].read(file)
    assert str(caught.value).startswith(f"{file}: {reason}")


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    # Spreadsheets write one; it made the first action unreadable.
    file = tmp_path / "sheet.csv"
    file.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert Schedule.from_csv(file) == Schedule.from_orders([["0F0", "0B0"]])


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[2Jb", "a\nb"])
def test_names_that_cannot_be_shown_are_mended(name: str, tmp_path: Path) -> None:
    # A page with half a surrogate pair cannot be written, and terminals obey escape sequences.
    fields = json.loads(valid_files.timeline_files()[0])
    (tmp_path / "step.json").write_text(json.dumps({**fields, "name": name}))
    timeline = read_timeline(tmp_path / "step.json")
    assert timeline.schedule.name.isprintable()
    assert page(timeline).encode()


def test_a_long_cell_is_told_in_short(tmp_path: Path) -> None:
    # The message held the whole cell, and so filled the screen.
    (tmp_path / "long.csv").write_text("0F" + "0" * 100_000)
    with pytest.raises(ParseError) as caught:
        Schedule.from_csv(tmp_path / "long.csv")
    check_message(str(caught.value), "long.csv: rank 0, cell 0: not a valid action: '0F000")


def test_a_step_that_takes_no_time_is_explained() -> None:
    # Its critical path ends with the first row that ends last, before which nothing computes.
    found = explain(
        lower(build("1F1B", ranks=2, microbatches=2)),
        Costs(forward=0, backward_input=0, backward_weight=0),
    )
    assert found.critical_seconds["transfer"] == 0.0


def test_what_rounding_leaves_of_bytes_is_read_back(tmp_path: Path) -> None:
    # Sums of tenths went below zero where they end, which no reader takes.
    costs = Costs(activation_bytes=0.1, weight_stash_bytes=0.3)
    timeline = simulate(build("ZB-H1", ranks=2, microbatches=3), costs)
    write_timeline(timeline, tmp_path / "step.json")
    assert read_timeline(tmp_path / "step.json").memory.tolist() == timeline.memory.tolist()


@pytest.mark.parametrize("seconds", [5e-324, 1e-320, 1e-310, 1e-200, 1e-100, 1e100])
def test_costs_of_any_size_are_drawn_and_read_back(seconds: float, tmp_path: Path) -> None:
    # Ticks of an axis were divided by zero where times vanish; sums of huge ones were infinite.
    costs = Costs(forward=seconds, backward_input=seconds, backward_weight=seconds)
    timeline = simulate(build("ZBV", ranks=2, microbatches=4), costs)
    assert page(timeline)
    assert timeline_html(timeline)
    write_timeline(timeline, tmp_path / "step.json")
    assert read_timeline(tmp_path / "step.json").end.tolist() == timeline.end.tolist()


def test_a_recorded_step_that_went_against_its_needs_is_drawn(tmp_path: Path) -> None:
    # What each row waited for was followed back for ever where rows wait for one another.
    step = {"name": "a", "schedule": ["0B0,0F0"], "start": [[0, 1]], "end": [[1, 2]]}
    assert judge(READERS["timeline"], json.dumps({**step, "bytes": [[0, 0]]}).encode(), tmp_path)


def test_a_timeline_of_stages_that_never_compute_is_refused(tmp_path: Path) -> None:
    # Schedules are checked before they are drawn, timelines were not: an IndexError.
    fields = json.loads(valid_files.timeline_files()[0])
    fields["schedule"][0] = fields["schedule"][0].replace("0B1", "7UNSHARD")
    assert not judge(READERS["timeline"], json.dumps(fields).encode(), tmp_path)


def test_links_of_fifty_thousand_ranks_are_told_apart() -> None:
    # The number of a pair of ranks did not fit into 32 bits, and its transfer took no time.
    schedule = Schedule.from_orders([[f"{rank}F0"] for rank in range(50_000)])
    assert simulate(schedule, Costs(transfer=1)).end_time == 99_999
