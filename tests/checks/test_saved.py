"""The rules for RECOMPUTE, OFFLOAD and RELOAD."""

import pytest

from penstock.checks.report import find_problems
from tests.tables import read_schedule


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("0F0 0RECOMPUTE0 0B0", None),
        ("0F0 0OFFLOAD0 0RELOAD0 0B0", None),
        ("0F0 0RECOMPUTE0 0I0 0W0", None),
        ("0F0 0RECOMPUTE0 0RECOMPUTE0 0B0", "0RECOMPUTE0: appears 2 times (rule: memory)"),
        ("0RECOMPUTE0 0F0 0B0", "0RECOMPUTE0: comes before its forward has ended (rule: order)"),
        ("0F0 0B0 0RECOMPUTE0", "0B0: comes before its RECOMPUTE has ended (rule: order)"),
        ("0F0 0OFFLOAD0 0B0", "0OFFLOAD0: its other half 0RELOAD0 is missing (rule: memory)"),
        ("0F0 0RELOAD0 0B0", "0RELOAD0: its other half 0OFFLOAD0 is missing (rule: memory)"),
        (
            "0F0 0RELOAD0 0OFFLOAD0 0B0",
            "0RELOAD0: comes before its OFFLOAD has ended (rule: order)",
        ),
        ("0F0 0OFFLOAD0 0B0 0RELOAD0", "0B0: comes before its RELOAD has ended (rule: order)"),
        (
            "0OFFLOAD0 0F0 0RELOAD0 0B0",
            "0OFFLOAD0: comes before its forward has ended (rule: order)",
        ),
        (
            "0F0 0OFFLOAD0 0RELOAD0 0RECOMPUTE0 0B0",
            "0OFFLOAD0: its forward saves only its inputs, because a RECOMPUTE runs it again; "
            "keep the RECOMPUTE, or OFFLOAD and RELOAD (rule: memory)",
        ),
        (
            "0F0 0RECOMPUTE0",
            "0RECOMPUTE0: no backward of its stage and microbatch follows; remove it "
            "(rule: memory)",
        ),
        ("0F0 0RECOMPUTE1 0B0", "0RECOMPUTE1: microbatches must be from 0 to 0 (rule: numbering)"),
        (
            "0UNSHARD 0F0 0RESHARD 0RECOMPUTE0 0UNSHARD 0B0 0RESHARD",
            "0RECOMPUTE0: its stage is not unsharded here (rule: parameters)",
        ),
    ],
)
def test_broken_rule_is_named(order: str, problem: str | None) -> None:
    found = find_problems(read_schedule(order))
    told = str(found[0]).split("\n")[0].split(", ", 2)[-1] if found else None
    assert told == problem


def test_ranks_that_wait_for_each_other_around_a_recompute_are_a_deadlock() -> None:
    schedule = read_schedule("0F0 0RECOMPUTE0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")
    assert [problem.rule for problem in find_problems(schedule)] == ["deadlock"]
