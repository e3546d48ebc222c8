"""`penstock explain` on flight records and recorded steps: text, page and JSON."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli import main
from penstock.files.flight.log import FlightRecord, Phase
from penstock.ir.placement import Placement
from tests.browser import Browser, Opener
from tests.files.flight.flights import action, ended, write_file
from tests.sim.messages import timeline_of

LOOP = Placement.loop(4)


KILLED = """\
mine on 4 ranks, with records of all ranks. The records end at 1970-01-12
13:47:00 UTC; times count back from then.

rank  action   step     for  waiting for           previous actions
0     0B0      1     11.0 s  0RECV_B0 from rank 1  0F0 0F1 0F2
1     1B0      1     11.0 s  1RECV_B0 from rank 2  1F0 1F1
2     2B0      1     11.0 s  silent for 8.0 s      2F0 2F1
3     outcome  1     10.0 s  rank 2                3F0 3B0

rank 2 (process 4002 on here) went silent 8.0 s before the end, in 2B0 (backward
of microbatch 0 in stage 2) of step 1, which began 11.0 s before the end; ranks
0, 1, 3 were waiting for it.

mine, step 1, as recorded; unfinished: 2B0
rank 0  F0----F1-----F2----.....................................................
rank 1  ..........F0----F1----..................................................
rank 2  ......................F0-----F1----................B0-------------------
rank 3  ...................................F0-----B0----........................
        |0 s         |2           |4          |6           |8           |10
        F Forward   B Full backward   . Idle"""


def explain(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["explain", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.splitlines())


def waiting(text: str, message: str) -> FlightRecord:
    return FlightRecord(1, action(text), 9.0, action(message), 9.0)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Write the records of a run in which rank 2 was killed in its first backward."""
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


@pytest.mark.parametrize(
    "arguments", [("show",), ("trace",), ("simulate",), ("compare", "1F1B", "-m", "3")]
)
def test_flight_records_are_taken_wherever_a_recorded_step_is(
    killed: Path, arguments: tuple[str, ...]
) -> None:
    command, *others = arguments
    for source in (killed, sorted(killed.glob("*.flight"))[2]):
        result = CliRunner().invoke(main, [command, str(source), *others])
        assert (result.exit_code, result.stderr) == (0, "")
        assert "mine" in result.stdout or command == "show"


def test_killed_rank_is_named_with_its_last_action(killed: Path) -> None:
    assert explain(str(killed)) == KILLED


def test_records_of_some_ranks_are_explained_as_far_as_possible(killed: Path) -> None:
    text = explain(str(killed / "rank0.flight"), str(killed / "rank1.flight"))
    assert text.splitlines()[:8] == [
        "mine on 4 ranks, with records of 2 of them (missing: ranks 2, 3). The records",
        "end at 1970-01-12 13:47:00 UTC; times count back from then.",
        "",
        "rank  action  step     for  waiting for           previous actions",
        "0     0B0     1     11.0 s  0RECV_B0 from rank 1  0F0 0F1 0F2",
        "1     1B0     1     11.0 s  1RECV_B0 from rank 2  1F0 1F1",
        "",
        "rank 2 left no record here: it ran elsewhere or finished normally; ranks 0, 1",
    ]


def explain_cause(folder: Path, *ranks: list[FlightRecord]) -> str:
    """Return the description of the cause in one line."""
    for rank, records in enumerate(ranks):
        write_file(folder, rank, records, placement=LOOP, heard=20.0)
    return " ".join(explain(str(folder)).split("\n\n")[2].splitlines())


def test_every_cause_is_described(tmp_path: Path) -> None:
    f0, f3 = waiting("2F0", "2RECV_F0"), waiting("3F0", "3RECV_F0")
    assert explain_cause(
        tmp_path, [FlightRecord(1, action("0F0"), 5.0)], [waiting("1F0", "1RECV_F0")], [f0], [f3]
    ) == (
        "rank 0 (process 4000 on here) was not waiting for any rank, in 0F0 (forward of "
        "microbatch 0 in stage 0) of step 1, which began 15.0 s before the end; ranks 1-3 were "
        "waiting for it."
    )
    assert explain_cause(
        tmp_path, [*ended("0F0 0SEND_F0")], [waiting("1F0", "1RECV_F0")], [f0], [f3]
    ) == (
        "rank 1 is waiting for 1RECV_F0 from rank 0, which was sent 18.0 s before the end and "
        "did not arrive; ranks 1-3 were waiting for that message."
    )
    cycle = [[waiting("0B0", "0RECV_B0")], [waiting("1F0", "1RECV_F0")]]
    assert explain_cause(tmp_path, *cycle, [f0], [f3]) == (
        "deadlock: ranks 0 > 1 > 0 waited for each other; ranks 2, 3 waited for them."
    )
    meeting = FlightRecord(2, Phase.AGREEMENT, 9.0)
    assert explain_cause(tmp_path, *([meeting] for _ in range(4))) == (
        f"all ranks had reached {Phase.AGREEMENT}, which did not finish."
    )
    outside = [FlightRecord(1, Phase.OUTCOME, 1.0, end=2.0)]
    assert explain_cause(tmp_path, *([meeting] for _ in range(3)), outside) == (
        f"rank 3 (process 4003 on here) was outside the pipeline, after {Phase.OUTCOME} of "
        "step 1, which ended 18.0 s before the end; ranks 0-2 were waiting for it."
    )
    assert explain_cause(tmp_path, *([meeting] for _ in range(3)), []) == (
        "rank 3 (process 4003 on here) was outside the pipeline, before its first action; "
        "ranks 0-2 were waiting for it."
    )


def test_only_the_most_informative_of_many_ranks_are_listed(tmp_path: Path) -> None:
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
        "rank  action   step     for  waiting for               previous actions",
        "0     0B0      1     11.0 s  0RECV_B0 from rank 1      0F0",
        "1     1B0      1     11.0 s  1RECV_B0 from rank 2      1F0",
    ]
    assert lines[18:] == [
        "998   998B0    1     11.0 s  998RECV_B0 from rank 999  998F0",
        "999   nothing  1     18.0 s  silent for 10.0 s         999F0",
        "… and 984 more ranks",
        "",
        "rank 999 (process 4999 on here) went silent 10.0 s before the end, after 999F0",
        "(forward of microbatch 0 in stage 999) of step 1, which ended 18.0 s before the",
        "end; ranks 0-998 were waiting for it.",
        "",
        "mine, step 1, as recorded",
        "(too many ranks to draw here: 1000; use --html FILE)",
    ]


def test_page_of_an_unfinished_step_opens(killed: Path, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "step.html"
    explain(str(killed), "--html", str(file))
    opener = Opener(browser, tmp_path)
    visit = opener(file.read_text(encoding="utf-8"))
    visit.settle()
    heading = visit.page.locator("h2").first.text_content()
    opener.close()
    assert heading == "mine, step 1, as recorded; unfinished: 2B0"


def test_json_has_the_same_content(killed: Path) -> None:
    values = json.loads(explain(str(killed), "--json"))
    ranks = values.pop("per_rank")
    assert values == {
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
        (
            ["1F1B", "ZBV"],
            "explain takes one schedule, or a plan and its recorded step (got 1F1B, ZBV)",
        ),
        (["no.flight"], "no.flight: no such file or directory"),
    ],
)
def test_unusable_sources_are_rejected(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["explain", *arguments])
    assert (result.exit_code, result.stderr) == (2, f"penstock: {message}\n")


# ---- recorded steps


def test_recorded_step_is_explained_with_its_waits_and_compute_beside_messages(
    tmp_path: Path,
) -> None:
    seconds = [0.025, 0.026, 0.024, 0.036, 0.037, 0.035]
    pending = (0.075, 0.183)
    step = timeline_of(seconds, [*[(0.0, 0.0)] * 5, pending], sent=0.2)
    ps.write_timeline(step, tmp_path / "step.json")
    lines = explain(str(tmp_path / "step.json")).splitlines()
    # The first line was that of the simulation, as if it were the recorded step's own.
    assert lines[0].startswith(f"As recorded, the last rank ends after {step.end_time:.4g} s; ")
    first = lines.index("Critical path") - 3
    assert lines[first].startswith("Simulated with the usual seconds")
    slowed = lines.index("Compute beside messages, as recorded")
    assert lines[slowed + 1] == (
        "F of stage 1 took 1.4x as long while receives were pending (36 ms against 25 ms)"
    )
    assert "Waits, as recorded" in lines
    found = json.loads(explain(str(tmp_path / "step.json"), "--json"))
    (slow,) = found["slowdowns"]
    assert {name: slow[name] for name in ("rank", "stage", "kind", "messages")} == {
        "rank": 1,
        "stage": 1,
        "kind": "F",
        "messages": "receives",
    }
    assert found["recorded_waits"] == []
    assert found["recorded_end_time"] == step.end_time
    # With other costs it is not that step any more.
    text = explain(str(tmp_path / "step.json"), "--transfer", "0.1")
    assert "as recorded" not in text


def test_recorded_step_without_slower_compute_says_so(tmp_path: Path) -> None:
    timeline = ps.simulate(ps.lower(ps.build("1F1B", ranks=2, microbatches=2)))
    ps.write_timeline(timeline, tmp_path / "step.json")
    lines = explain(str(tmp_path / "step.json")).splitlines()
    assert "nothing was notably slower beside messages" in lines
    start = lines.index("Waits, as recorded")
    assert [line.split()[:2] for line in lines[start + 2 : start + 4]] == [["rank", "0"]] * 2


def test_a_plan_and_its_recorded_step_are_compared(tmp_path: Path) -> None:
    found = ps.plan(ps.Costs(), ranks=2, microbatches=4, seconds=0.2)
    found.to_file(tmp_path / "plan.json")
    slow = ps.simulate(ps.lower(found.schedule), ps.Costs(forward=2))
    ps.write_timeline(slow, tmp_path / "step.json")
    files = [str(tmp_path / "plan.json"), str(tmp_path / "step.json")]
    page = tmp_path / "both.html"
    text = explain(*files, "--html", str(page))
    assert text.rstrip() == str(ps.review(found.timeline, slow))
    assert "Why the step took another time than predicted" in page.read_text()
    values = json.loads(explain(*files, "--json"))
    assert values["step"] == {"predicted": found.timeline.end_time, "recorded": slow.end_time}
    assert values["per_kind"]["F"] == {"predicted": 8.0, "recorded": 16.0}
