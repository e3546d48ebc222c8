"""Every action once, on its rank, in an order that its own stage allows."""

from dataclasses import replace

import pytest

from penstock.checks.report import find_problems
from penstock.ir.actions import Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from tests.tables import read_schedule


def problems_of(schedule: Schedule) -> list[str]:
    return list(map(str, find_problems(schedule)))


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        # What torch's validator accepts: numbers from 1, a forward twice, B with I and W.
        (
            "0F1 0F2 0B1 0B2",
            [
                "rank 0, 0F0: is missing; microbatches must be numbered from 0 (rule: once)",
                "rank 0, 0B0: is missing; microbatches must be numbered from 0 (rule: once)",
            ],
        ),
        (
            "0F0 0F0 0B0",
            ["rank 0, position 1, 0F0: appears 2 times (rule: once)\n  rank 0: 0F0 [0F0] 0B0"],
        ),
        (
            "0F0 0B0 0I0 0W0",
            [
                "rank 0, position 1, 0B0: the backward is both whole and split; "
                "keep B, or I and W (rule: backward)\n  rank 0: 0F0 [0B0] 0I0 0W0"
            ],
        ),
        (
            "0F0 0I0 0B0",
            [
                "rank 0, position 2, 0B0: the backward is both whole and split; "
                "keep B, or I and W (rule: backward)\n  rank 0: 0F0 0I0 [0B0]"
            ],
        ),
        ("0F0 0B0 0B1", ["rank 0, 0F1: is missing (rule: once)"]),
        ("0F0 0F1 0B0", ["rank 0, 0B1: is missing (rule: once)"]),
        (
            "0F0 0F1 0B0\n1F0 1B0 1B1",
            [
                "rank 1, 1F1: is missing (rule: once)",
                "rank 0, 0B1: is missing (rule: once)",
            ],
        ),
        (
            "0F0 0I0",
            [
                "rank 0, position 1, 0I0: its other half 0W0 is missing (rule: backward)\n"
                "  rank 0: 0F0 [0I0]"
            ],
        ),
        (
            "0F0 0W0",
            [
                "rank 0, position 1, 0W0: its other half 0I0 is missing (rule: backward)\n"
                "  rank 0: 0F0 [0W0]"
            ],
        ),
        (
            "0F0 0B0 0B0 0B0",
            ["rank 0, position 3, 0B0: appears 3 times (rule: once)\n  rank 0: 0F0 0B0 0B0 [0B0]"],
        ),
        (
            "0B0 0F0",
            [
                "rank 0, position 0, 0B0: comes before its forward has ended (rule: order)\n"
                "  rank 0: [0B0] 0F0"
            ],
        ),
        (
            "0F0 0W0 0I0",
            [
                "rank 0, position 1, 0W0: comes before its input half has ended (rule: order)\n"
                "  rank 0: 0F0 [0W0] 0I0"
            ],
        ),
        (
            "(0F0;0B0)OVERLAP_F_B",
            [
                "rank 0, position 0, 0B0: comes before its forward has ended (rule: order)\n"
                "  rank 0: [(0F0;0B0)OVERLAP_F_B]"
            ],
        ),
        (
            "0F0 0B0 5UNSHARD",
            [
                "rank 0, position 2, 5UNSHARD: stages must be from 0 to 0 (rule: numbering)\n"
                "  rank 0: 0F0 0B0 [5UNSHARD]"
            ],
        ),
        (
            "0F0 0SEND_F7 0B0",
            [
                "rank 0, position 1, 0SEND_F7: microbatches must be from 0 to 0 "
                "(rule: numbering)\n"
                "  rank 0: 0F0 [0SEND_F7] 0B0"
            ],
        ),
        (
            "0F0 0B0 1UNSHARD\n1F0 1B0",
            [
                "rank 0, position 2, 1UNSHARD: stage 1 is on rank 1 (rule: placement)\n"
                "  rank 0: 0F0 0B0 [1UNSHARD]"
            ],
        ),
    ],
)
def test_incomplete_or_contradictory_schedule_is_refused(
    picture: str, expected: list[str]
) -> None:
    assert problems_of(read_schedule(picture)) == expected


def test_microbatch_runs_in_one_copy_of_the_model() -> None:
    schedule = read_schedule("0F0 3F1 3F0\n2F1 1F0 2F0", Dataflow.copies(2, 2))
    assert problems_of(schedule) == [
        "rank 1, position 2, 2F0: microbatch 0 runs in another copy of the model (rule: once)\n"
        "  rank 1: 2F1 1F0 [2F0]",
        "rank 0, position 2, 3F0: microbatch 0 runs in another copy of the model (rule: once)\n"
        "  rank 0: 0F0 3F1 [3F0]",
    ]


def test_message_cannot_be_part_of_an_overlap() -> None:
    # Text cannot say this, but columns can; showing the neighbours as works once failed.
    schedule = read_schedule("0F0 0SEND_F0\n1RECV_F0 1F0")
    rows = replace(schedule.rows, joined=schedule.rows.is_kind(Kind.SEND_F))
    assert problems_of(replace(schedule, rows=rows)) == [
        "rank 0, position 0, 0SEND_F0: only compute can be overlapped (rule: overlap)"
    ]


def test_schedule_without_any_action_lacks_everything() -> None:
    # The search for actions in the wrong order once failed where there was none at all.
    schedule = replace(read_schedule("0F0"), rows=Rows.from_works([[]]))
    assert problems_of(schedule) == [
        "rank 0, 0F0: is missing; microbatches must be numbered from 0 (rule: once)"
    ]


def test_neighbourhood_shows_three_works_on_either_side() -> None:
    schedule = read_schedule(
        "0F0 0F1 0F2 0F3 0B0 0F4 (0F5;0B1)OVERLAP_F_B 0F5 (0F6;0B2)OVERLAP_F_B 0B3 0B4 0B5 0B6"
    )
    assert problems_of(schedule) == [
        "rank 0, position 7, 0F5: appears 2 times (rule: once)\n"
        "  rank 0: 0B0 0F4 (0F5;0B1)OVERLAP_F_B [0F5] (0F6;0B2)OVERLAP_F_B 0B3 0B4"
    ]
