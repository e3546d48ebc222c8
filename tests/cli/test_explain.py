"""`penstock explain` on flight records: the whole text, the page, the numbers."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import main
from penstock.files.flight.log import FlightRecord, Phase
from penstock.ir.placement import Placement
from tests.browser import Opener, open_browser
from tests.files.flight.flights import action, ended, write_file

LOOP = Placement.loop(4)


KILLED = """\
mine on 4 ranks, with the records of all. They end at 1970-01-12 13:47:00 UTC;
seconds count back from there.

rank  was in   of step     for  waiting for           before that
0     0B0      1        11.0 s  0RECV_B0 from rank 1  0F0 0F1 0F2
1     1B0      1        11.0 s  1RECV_B0 from rank 2  1F0 1F1
2     2B0      1        11.0 s  silent for 8.0 s      2F0 2F1
3     outcome  1        10.0 s  rank 2                3F0 3B0

rank 2 (process 4002 on here) fell silent 8.0 s before the end, in 2B0 (backward
of microbatch 0 in stage 2) of step 1 since 11.0 s; ranks 0, 1, 3 waited for it
in the end.

mine, step 1, as recorded; not ended: 2B0
rank 0  F0----F1-----F2----.....................................................
rank 1  ..........F0----F1----..................................................
rank 2  ......................F0-----F1----................B0-------------------
rank 3  ...................................F0-----B0----........................
        |0           |2           |4          |6           |8           |10
        F Forward   B Full backward   . Idle"""


def explain(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["explain", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.splitlines())


def waiting(text: str, message: str) -> FlightRecord:
    return FlightRecord(1, action(text), 9.0, action(message), 9.0)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Rank 2 was killed in its first backward."""
    lists = {
        0: [*ended("0F0 0F1 0F2"), waiting("0B0", "0RECV_B0")],
        1: [*ended("1F0 1F1", start=2.5), waiting("1B0", "1RECV_B0")],
        2: [*ended("2F0 2F1", start=4.5), FlightRecord(1, action("2B0"), 9.0)],
        3: [*ended("3F0 3B0", start=6.5), FlightRecord(1, Phase.OUTCOME, 10.0)],
    }
    folder = tmp_path / "flight"
    folder.mkdir()
    for rank, records in lists.items():
        closed = None if rank == 2 else 20.0
        write_file(folder, rank, records, placement=LOOP, heard=12.0, closed=closed)
    return folder


def test_the_rank_that_was_killed_is_named_with_what_it_did(killed: Path) -> None:
    assert explain(str(killed)) == KILLED


def test_files_of_some_ranks_say_what_they_can(killed: Path) -> None:
    told = explain(str(killed / "rank0.flight"), str(killed / "rank1.flight"))
    assert told.splitlines()[:8] == [
        "mine on 4 ranks, with the records of 2 (none of ranks 2, 3). They end at",
        "1970-01-12 13:47:00 UTC; seconds count back from there.",
        "",
        "rank  was in  of step     for  waiting for           before that",
        "0     0B0     1        11.0 s  0RECV_B0 from rank 1  0F0 0F1 0F2",
        "1     1B0     1        11.0 s  1RECV_B0 from rank 2  1F0 1F1",
        "",
        "rank 2 left no record here, for it ran elsewhere or ended well; ranks 0, 1",
    ]


def last_words(folder: Path, *ranks: list[FlightRecord]) -> str:
    """What is said of the cause, in one line."""
    for rank, records in enumerate(ranks):
        write_file(folder, rank, records, placement=LOOP, heard=20.0)
    return " ".join(explain(str(folder)).split("\n\n")[2].splitlines())


def test_other_causes_are_told(tmp_path: Path) -> None:
    f0, f3 = waiting("2F0", "2RECV_F0"), waiting("3F0", "3RECV_F0")
    assert last_words(
        tmp_path, [FlightRecord(1, action("0F0"), 5.0)], [waiting("1F0", "1RECV_F0")], [f0], [f3]
    ) == (
        "rank 0 (process 4000 on here) waited for nobody, in 0F0 (forward of microbatch 0 in "
        "stage 0) of step 1 since 15.0 s; ranks 1-3 waited for it in the end."
    )
    assert last_words(
        tmp_path, [*ended("0F0 0SEND_F0")], [waiting("1F0", "1RECV_F0")], [f0], [f3]
    ) == (
        "what rank 1 waits for, 1RECV_F0 from rank 0, was sent by rank 0 18.0 s before the end "
        "and did not arrive; ranks 1-3 waited for that in the end."
    )
    cycle = [[waiting("0B0", "0RECV_B0")], [waiting("1F0", "1RECV_F0")]]
    assert last_words(tmp_path, *cycle, [f0], [f3]) == (
        "the ranks 0 > 1 > 0 waited for one another; ranks 2, 3 waited for them."
    )
    meeting = FlightRecord(2, Phase.AGREEMENT, 9.0)
    assert last_words(tmp_path, *([meeting] for _ in range(4))) == (
        "all ranks had come to the agreement before the step, which did not end."
    )
    outside = [FlightRecord(1, Phase.OUTCOME, 1.0, end=2.0)]
    assert last_words(tmp_path, *([meeting] for _ in range(3)), outside) == (
        "rank 3 (process 4003 on here) was not in the pipeline, after the meeting after the step "
        "of step 1, which ended 18.0 s before the end; ranks 0-2 waited for it in the end."
    )
    assert last_words(tmp_path, *([meeting] for _ in range(3)), []) == (
        "rank 3 (process 4003 on here) was not in the pipeline, and had begun nothing yet; "
        "ranks 0-2 waited for it in the end."
    )


def test_of_many_ranks_those_that_matter_are_shown(tmp_path: Path) -> None:
    placement = Placement.loop(1000)
    for rank in range(999):
        record = waiting(f"{rank}B0", f"{rank}RECV_B0")
        write_file(
            tmp_path,
            rank,
            [*ended(f"{rank}F0"), record],
            placement=placement,
            closed=20.0,
            capacity=4,
        )
    write_file(tmp_path, 999, ended("999F0"), placement=placement, heard=10.0, capacity=4)
    lines = explain(str(tmp_path)).splitlines()
    assert len(lines) == 28
    assert lines[3:6] == [
        "rank  was in   of step     for  waiting for               before that",
        "0     0B0      1        11.0 s  0RECV_B0 from rank 1      0F0",
        "1     1B0      1        11.0 s  1RECV_B0 from rank 2      1F0",
    ]
    assert lines[18:] == [
        "998   998B0    1        11.0 s  998RECV_B0 from rank 999  998F0",
        "999   nothing  1        18.0 s  silent for 10.0 s         999F0",
        "… and 984 more ranks",
        "",
        "rank 999 (process 4999 on here) fell silent 10.0 s before the end, after 999F0",
        "(forward of microbatch 0 in stage 999) of step 1, which ended 18.0 s before the",
        "end; ranks 0-998 waited for it in the end.",
        "",
        "mine, step 1, as recorded",
        "(a picture of 1000 ranks is for --html FILE)",
    ]


def test_the_page_of_a_step_that_did_not_end_loads(killed: Path, tmp_path: Path) -> None:
    file = tmp_path / "step.html"
    explain(str(killed), "--html", str(file))
    with open_browser() as browser:
        opener = Opener(browser, tmp_path)
        visit = opener(file.read_text(encoding="utf-8"))
        visit.settle()
        heading = visit.page.locator("h2").first.text_content()
        opener.close()
    assert heading == "mine, step 1, as recorded; not ended: 2B0"


def test_the_same_is_told_as_numbers(killed: Path) -> None:
    told = json.loads(explain(str(killed), "--json"))
    ranks = told.pop("per_rank")
    assert told == {
        "schedule": "mine",
        "ranks": 4,
        "missing": [],
        "end": 1_000_020.0,
        "last_step": 1,
        "causes": [{"reason": "silent", "ranks": [2], "waiting": [0, 1, 3]}],
    }
    assert ranks[0] == {
        "rank": 0,
        "host": "here",
        "process": 4000,
        "last_time": 1_000_020.0,
        "is_silent": False,
        "step": 1,
        "doing": "0B0",
        "start": 1_000_009.0,
        "end": None,
        "waiting_since": 1_000_009.0,
        "waiting_for": "0RECV_B0",
        "waits_for_rank": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1F1B", "ZBV"], "one schedule is explained at a time (got 1F1B, ZBV)"),
        (["no.flight"], "[Errno 2] No such file or directory: 'no.flight'"),
    ],
)
def test_what_cannot_be_explained_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["explain", *arguments])
    assert (result.exit_code, result.stderr) == (2, f"penstock: {message}\n")
