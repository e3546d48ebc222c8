"""The playground finds what Python's checks find, in the same words."""

from itertools import product
from random import Random
from typing import Any

from penstock.checks import find_problems
from penstock.errors import ScheduleError
from penstock.ir.actions import Work
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.ir.text import parse_csv
from penstock.schedules.registry import FAMILIES
from tests.browser import Opener
from tests.view.playground.pages import page, settings, stages_of

PASTED = (
    "",
    "\n\n",
    "0F0,0B0\n1F0,1B0x\n",
    "0F0,hello\n",
    "0F0,0B0\n,,\n",
    "0F0,0B0\n2F0,2B0\n",
    "0F0,0B0,1F0\n1B0\n",
    "9F0\n",
    "0F9,0B9\n",
    "0F0,0I0\n1F0,1B0\n",
    "0F0,0B0,0I0,0W0\n",
    "0F1,0B1\n",
    " 0F0 ,, 0B0 \n",
    "(0F1;0B0)OVERLAP_F_B,0F0,0B1\n",
    "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n",
    "# dataflow: 0>1 | parts: 0 1\n0F0,0B0\n1F0,1B0\n",
    "# dataflow: | parts: 0 0\n0F0,0B0\n1F0,1B0\n",
)

Edit = dict[str, dict[str, int]]


def random_edits(schedule: Schedule, random: Random) -> tuple[list[Edit], Schedule]:
    """Move or remove one to three works; return the edits, and the schedule after them."""
    orders: list[list[Work]] = [list(order) for order in schedule.orders]
    edits: list[Edit] = []
    for _ in range(random.randint(1, 3)):
        rank = random.randrange(len(orders))
        position = random.randrange(len(orders[rank]))
        work = orders[rank].pop(position)
        edit = {"from": {"rank": rank, "position": position}}
        if random.random() < 0.8:
            there = rank if random.random() < 0.8 else random.randrange(len(orders))
            place = random.randint(0, len(orders[there]))
            orders[there].insert(place, work)
            edit["to"] = {"rank": there, "position": place}
        edits.append(edit)
    rows = Rows.from_works(orders)
    return edits, Schedule(rows, schedule.placement, schedule.dataflow, schedule.microbatches)


def said(schedule: Schedule) -> list[str]:
    return [str(problem) for problem in find_problems(schedule)]


def test_random_edits_give_the_findings_of_python(visit_page: Opener) -> None:
    visit = visit_page(page())
    for name, (ranks, microbatches) in product(FAMILIES, ((2, 3), (4, 6))):
        random = Random(f"{name} {ranks}")
        base = FAMILIES[name].generate(ranks, microbatches, stages_of(name, 2))
        cases = [random_edits(base, random) for _ in range(6)]
        sizes: dict[str, Any] = settings(ranks=ranks, microbatches=microbatches, stages=2)
        found = visit.ask("findProblems", name, sizes, [edits for edits, _ in cases])
        for (edits, edited), texts in zip(cases, found, strict=True):
            assert texts == said(edited), (name, edits)
        rules = {text.rpartition("(rule: ")[2] for texts in found for text in texts}
        assert rules, f"no edit of {name} broke anything, so nothing was compared"


def test_a_deadlock_names_its_cycle_as_python_does(visit_page: Opener) -> None:
    text = "0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n"
    crossed = "0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    stuck = "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"
    visit = visit_page(page())
    for case in (text, crossed, stuck):
        orders, flow = parse_csv(case)
        assert visit.ask("read", case) == said(Schedule.from_orders(orders, dataflow=flow))
    assert "deadlock: these actions wait for each other" in visit.ask("read", stuck)[0]


def test_pasted_text_is_read_as_python_reads_it(visit_page: Opener) -> None:
    visit = visit_page(page())
    for text in PASTED:
        try:
            orders, flow = parse_csv(text)
            expected = said(Schedule.from_orders(orders, dataflow=flow))
        except ScheduleError as error:
            expected = [str(error)]
        assert visit.ask("read", text) == expected, text
