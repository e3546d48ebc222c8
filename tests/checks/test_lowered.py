"""Messages, whole parameters and gradient reductions."""

import pytest

from penstock.checks.report import find_problems
from tests.tables import read_schedule

LOWERED = """
    0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0RESHARD
    1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1RESHARD
"""


def problems_of(picture: str) -> list[str]:
    return list(map(str, find_problems(read_schedule(picture))))


def test_lowered_schedule_is_fine() -> None:
    assert problems_of(LOWERED) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # Torch loads a file with a missing send, or with a send too late, and then hangs.
        ("0SEND_F0 ", "", ["rank 0, 0SEND_F0: is missing (rule: messages)"]),
        ("1RECV_F0 ", "", ["rank 1, 1RECV_F0: is missing (rule: messages)"]),
        ("1SEND_B0 ", "", ["rank 1, 1SEND_B0: is missing (rule: messages)"]),
        ("0RECV_B0 ", "", ["rank 0, 0RECV_B0: is missing (rule: messages)"]),
        (
            "0F0 0SEND_F0",
            "0SEND_F0 0F0",
            [
                "rank 0, position 1, 0SEND_F0: comes before what it sends is made "
                "(rule: messages)\n  rank 0: 0UNSHARD [0SEND_F0] 0F0 0RECV_B0 0B0"
            ],
        ),
        (
            "1B0 1SEND_B0",
            "1SEND_B0 1B0",
            [
                "rank 1, position 3, 1SEND_B0: comes before what it sends is made "
                "(rule: messages)\n"
                "  rank 1: 1UNSHARD 1RECV_F0 1F0 [1SEND_B0] 1B0 1REDUCE_GRAD 1RESHARD"
            ],
        ),
        (
            "1RECV_F0 1F0",
            "1F0 1RECV_F0",
            [
                "rank 1, position 2, 1RECV_F0: comes after the work that uses it "
                "(rule: messages)\n"
                "  rank 1: 1UNSHARD 1F0 [1RECV_F0] 1B0 1SEND_B0 1REDUCE_GRAD"
            ],
        ),
        (
            "0SEND_F0",
            "0SEND_F0 0SEND_F0",
            [
                "rank 0, position 2, 0SEND_F0: appears more often than needed "
                "(rule: messages)\n  rank 0: 0UNSHARD 0F0 [0SEND_F0] 0SEND_F0 0RECV_B0 0B0"
            ],
        ),
        (
            "0SEND_F0",
            "0SEND_F0 0SEND_F0>7",
            [
                "rank 0, position 3, 0SEND_F0>7: stages 0 and 7 do not feed each other "
                "(rule: messages)\n"
                "  rank 0: 0UNSHARD 0F0 0SEND_F0 [0SEND_F0>7] 0RECV_B0 0B0 0REDUCE_GRAD"
            ],
        ),
        (
            "0UNSHARD ",
            "",
            [
                "rank 0, position 0, 0F0: its stage is not unsharded here (rule: parameters)\n"
                "  rank 0: [0F0] 0SEND_F0 0RECV_B0 0B0",
                "rank 0, position 3, 0B0: its stage is not unsharded here (rule: parameters)\n"
                "  rank 0: 0F0 0SEND_F0 0RECV_B0 [0B0] 0REDUCE_GRAD 0RESHARD",
                "rank 0, position 5, 0RESHARD: its stage is not unsharded here "
                "(rule: parameters)\n  rank 0: 0RECV_B0 0B0 0REDUCE_GRAD [0RESHARD]",
            ],
        ),
        # Work on a stage that is whole twice over was once said not to be unsharded.
        (
            "0UNSHARD",
            "0UNSHARD 0UNSHARD",
            [
                "rank 0, position 1, 0UNSHARD: its stage is already unsharded "
                "(rule: parameters)\n  rank 0: 0UNSHARD [0UNSHARD] 0F0 0SEND_F0 0RECV_B0",
                "rank 0, position 7, 0RESHARD: its stage is never resharded after this "
                "(rule: parameters)\n  rank 0: 0RECV_B0 0B0 0REDUCE_GRAD [0RESHARD]",
            ],
        ),
        (
            " 0RESHARD",
            "",
            [
                "rank 0, position 4, 0B0: its stage is never resharded after this "
                "(rule: parameters)\n  rank 0: 0F0 0SEND_F0 0RECV_B0 [0B0] 0REDUCE_GRAD"
            ],
        ),
        (
            "0RESHARD",
            "0RESHARD 0RESHARD",
            [
                "rank 0, position 7, 0RESHARD: its stage is not unsharded here "
                "(rule: parameters)\n  rank 0: 0B0 0REDUCE_GRAD 0RESHARD [0RESHARD]"
            ],
        ),
        ("0REDUCE_GRAD ", "", ["rank 0, 0REDUCE_GRAD: is missing (rule: reduction)"]),
        (
            "0B0 0REDUCE_GRAD",
            "0REDUCE_GRAD 0B0",
            [
                "rank 0, position 4, 0REDUCE_GRAD: comes before the last backward of its stage "
                "(rule: reduction)\n"
                "  rank 0: 0F0 0SEND_F0 0RECV_B0 [0REDUCE_GRAD] 0B0 0RESHARD"
            ],
        ),
        (
            "0REDUCE_GRAD",
            "0REDUCE_GRAD 0REDUCE_GRAD",
            [
                "rank 0, position 5, 0REDUCE_GRAD: gradients are reduced once per step "
                "(rule: reduction)\n"
                "  rank 0: 0SEND_F0 0RECV_B0 0B0 [0REDUCE_GRAD] 0REDUCE_GRAD 0RESHARD",
                "rank 0, position 6, 0REDUCE_GRAD: gradients are reduced once per step "
                "(rule: reduction)\n  rank 0: 0RECV_B0 0B0 0REDUCE_GRAD [0REDUCE_GRAD] 0RESHARD",
            ],
        ),
    ],
)
def test_lowered_schedule_with_one_thing_wrong_is_refused(
    before: str, after: str, expected: list[str]
) -> None:
    assert LOWERED.count(before) == 1
    assert problems_of(LOWERED.replace(before, after)) == expected


def test_message_between_stages_of_one_rank_is_refused() -> None:
    assert problems_of("0F0 0SEND_F0 1RECV_F0 1F0")[:2] == [
        "rank 0, position 1, 0SEND_F0: both stages are on this rank; no message is needed "
        "(rule: messages)\n  rank 0: 0F0 [0SEND_F0] 1RECV_F0 1F0",
        "rank 0, position 2, 1RECV_F0: both stages are on this rank; no message is needed "
        "(rule: messages)\n  rank 0: 0F0 0SEND_F0 [1RECV_F0] 1F0",
    ]


def test_message_in_a_model_of_one_stage_is_refused() -> None:
    # With no edge at all there was once no row in the table to put the message in.
    assert problems_of("0F0 0SEND_F0 0B0") == [
        "rank 0, position 1, 0SEND_F0: stages 0 and 1 do not feed each other "
        "(rule: messages)\n  rank 0: 0F0 [0SEND_F0] 0B0"
    ]


def test_gradient_message_without_backwards_is_refused() -> None:
    picture = """
        0F0 0SEND_F0 0RECV_B0
        1RECV_F0 1F0 1SEND_B0
    """
    assert problems_of(picture) == [
        "rank 1, position 2, 1SEND_B0: appears more often than needed (rule: messages)\n"
        "  rank 1: 1RECV_F0 1F0 [1SEND_B0]",
        "rank 0, position 2, 0RECV_B0: appears more often than needed (rule: messages)\n"
        "  rank 0: 0F0 0SEND_F0 [0RECV_B0]",
    ]


def test_reduction_without_a_backward_is_refused() -> None:
    # There is no last backward to come after, and so this once passed.
    assert problems_of("0F0 0REDUCE_GRAD") == [
        "rank 0, position 1, 0REDUCE_GRAD: its stage has no backward (rule: reduction)\n"
        "  rank 0: 0F0 [0REDUCE_GRAD]"
    ]


def test_sharding_and_reduction_may_be_left_out() -> None:
    picture = """
        0F0 0SEND_F0 0RECV_B0 0B0
        1RECV_F0 1F0 1B0 1SEND_B0
    """
    assert problems_of(picture) == []
