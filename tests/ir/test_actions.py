"""Actions and overlaps as values."""

import pytest

from penstock.ir.actions import Action, Kind, Overlap

FORWARD = Action(Kind.FORWARD, 0, 3)
BACKWARD = Action(Kind.FULL_BACKWARD, 7, 1)


def test_each_kind_has_its_text_which_is_that_of_torch_where_torch_has_it() -> None:
    assert {kind.name: kind.text for kind in Kind} == {
        "FORWARD": "F",
        "BACKWARD_INPUT": "I",
        "BACKWARD_WEIGHT": "W",
        "FULL_BACKWARD": "B",
        "SEND_F": "SEND_F",
        "RECV_F": "RECV_F",
        "SEND_B": "SEND_B",
        "RECV_B": "RECV_B",
        "UNSHARD": "UNSHARD",
        "RESHARD": "RESHARD",
        "REDUCE_GRAD": "REDUCE_GRAD",
        "RECOMPUTE": "RECOMPUTE",
        "OFFLOAD": "OFFLOAD",
        "RELOAD": "RELOAD",
    }


def test_kinds_fall_into_compute_communication_and_work_on_a_whole_stage() -> None:
    assert [kind.text for kind in Kind if kind.is_compute] == ["F", "I", "W", "B"]
    talks = ["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
    assert [kind.text for kind in Kind if kind.is_communication] == talks
    whole = ["UNSHARD", "RESHARD", "REDUCE_GRAD"]
    assert [kind.text for kind in Kind if not kind.has_microbatch] == whole
    assert [kind.text for kind in Kind if kind.is_memory] == ["RECOMPUTE", "OFFLOAD", "RELOAD"]


@pytest.mark.parametrize(
    ("kind", "peer"),
    [(Kind.SEND_F, 5), (Kind.RECV_B, 5), (Kind.RECV_F, 3), (Kind.SEND_B, 3)],
)
def test_peer_of_a_message_is_the_neighbour_in_a_chain_unless_given(kind: Kind, peer: int) -> None:
    action = Action(kind, 4, 0)
    assert action.peer == peer
    assert action == Action(kind, 4, 0, peer)
    assert str(action) == f"4{kind.text}0"
    assert str(Action(kind, 4, 0, 1)) == f"4{kind.text}0>1"


@pytest.mark.parametrize(
    ("kind", "stage", "microbatch", "peer", "message"),
    [
        (Kind.FORWARD, 0, None, None, "F takes a microbatch (got None)"),
        (Kind.SEND_F, 0, None, None, "SEND_F takes a microbatch (got None)"),
        (Kind.UNSHARD, 0, 1, None, "UNSHARD takes no microbatch (got 1)"),
        (Kind.FORWARD, 0, 0, 1, "F takes no peer (got 1)"),
        (Kind.RESHARD, 0, None, 1, "RESHARD takes no peer (got 1)"),
        # Negative numbers once went in, and came out of the columns as "no microbatch".
        (
            Kind.FORWARD,
            0,
            -1,
            None,
            "stages and microbatches must be numbered from 0 (got 0 and -1)",
        ),
        (
            Kind.FORWARD,
            -2,
            0,
            None,
            "stages and microbatches must be numbered from 0 (got -2 and 0)",
        ),
    ],
)
def test_action_that_makes_no_sense_is_refused(
    kind: Kind, stage: int, microbatch: int | None, peer: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        Action(kind, stage, microbatch, peer)
    assert str(caught.value) == message


def test_overlap_prints_its_members_in_order() -> None:
    assert str(Overlap((FORWARD, BACKWARD))) == "(0F3;7B1)OVERLAP_F_B"
    assert str(Overlap((BACKWARD, FORWARD))) == "(7B1;0F3)OVERLAP_F_B"


@pytest.mark.parametrize(
    ("members", "shown"),
    [
        ((), "()OVERLAP_F_B"),
        ((FORWARD,), "(0F3)OVERLAP_F_B"),
        ((FORWARD, Action(Kind.SEND_F, 0, 3)), "(0F3;0SEND_F3)OVERLAP_F_B"),
    ],
)
def test_overlap_of_anything_but_two_computes_is_refused(
    members: tuple[Action, ...], shown: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        Overlap(members)
    message = f"an overlap must hold two or more compute actions (got {shown})"
    assert str(caught.value) == message
