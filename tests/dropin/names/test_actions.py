import pickle
from itertools import product

import pytest

from penstock.dropin.names import actions as _actions
from penstock.dropin.names.actions import (
    OVERLAP_F_B,
    RESHARD,
    SEND_B,
    TYPE_OF_KIND,
    UNSHARD,
    ActionTextError,
    B,
    F,
    I,
    W,
    _Action,
    _ComputationType,
    _get_profiler_function_name,
    from_work,
    to_work,
    to_works,
)
from penstock.errors import ScheduleError
from penstock.ir.actions import Action, Kind
from penstock.ir.text import parse_work
from tests.dropin.incumbent import needs, pipelining

PLAIN = [
    f"{stage}{kind.text}{microbatch if kind.has_microbatch else ''}"
    for kind, stage, microbatch in product(TYPE_OF_KIND, (0, 3, 17), (0, 12))
]
OVERLAPS = ["(1F1;2B0)OVERLAP_F_B", "(0F3;7I1)OVERLAP_F_B", "(3F10;4F11;2B9)OVERLAP_F_B"]


def read(text: str) -> _Action:
    action = _Action.from_str(text)
    assert action is not None
    return action


@pytest.mark.parametrize("text", [*PLAIN, *OVERLAPS])
def test_text_goes_both_ways_and_means_what_it_means_in_torch(text: str) -> None:
    action = read(text)
    assert repr(action) == str(action) == text
    expected = pipelining._Action.from_str(text)
    assert str(tuple(action)) == str(tuple(expected))
    assert action.is_compute_op == expected.is_compute_op
    assert from_work(to_work(action)) == action


@pytest.mark.parametrize("text", ["0RECOMPUTE1", "0OFFLOAD1", "0RELOAD1"])
def test_actions_that_torch_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(ActionTextError, match="torch does not have"):
        _Action.from_str(text)


def test_fields_are_those_of_torch() -> None:
    assert _Action._fields == pipelining._Action._fields
    assert read("2SEND_B2") == _Action(2, SEND_B, 2) == (2, SEND_B, 2, None)
    assert read("1UNSHARD") == _Action(1, UNSHARD) == _Action(1, UNSHARD, None)
    named = _Action(stage_index=0, computation_type=F, microbatch_index=3)
    assert named == read("0F3")
    overlap = _Action(-1, OVERLAP_F_B, None, (_Action(1, F, 1), _Action(2, B, 0)))
    assert read("(1F1;2B0)OVERLAP_F_B") == overlap
    assert len({read("0F3"), named, overlap}) == 2


def test_blank_text_is_an_idle_slot() -> None:
    assert [_Action.from_str(text) for text in ("", " ", "   ")] == [None] * 3


def test_spaces_around_an_action_and_its_parts_are_dropped() -> None:
    assert str(_Action.from_str(" 1F0 ")) == "1F0"
    assert str(_Action.from_str("( 1F1 ; 2B0 )OVERLAP_F_B")) == "(1F1;2B0)OVERLAP_F_B"


@pytest.mark.parametrize(
    "text",
    [
        "1F0garbage",  # this one and those up to the next comment, torch accepts and misreads
        "1BW0",
        "1F-1",
        "1F",
        "1SEND_F",
        "1UNSHARD3",
        "(1F1;2B0)F",
        "(1F1;;2B0)OVERLAP_F_B",
        "(1F1)OVERLAP_F_B",
        "()OVERLAP_F_B",
        "(2SEND_F0;1F1)OVERLAP_F_B",
        "x1F0",  # these, torch refuses too
        "F0",
        "1 F0",
        "-1F0",
        "1f0",
        "1OVERLAP_F_B",
        "(1F1;2B0)",
        "0SEND_F1>3",
    ],
)
def test_text_that_is_not_an_action_is_refused(text: str) -> None:
    with pytest.raises(ActionTextError) as caught:
        _Action.from_str(text)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ScheduleError)


def test_refusal_names_the_text() -> None:
    with pytest.raises(ActionTextError) as caught:
        _Action.from_str("1F0garbage")
    assert str(caught.value) == (
        "not a valid action: '1F0garbage' (expected STAGE KIND MICROBATCH, e.g. 2F0)"
    )


def test_types_are_those_of_torch() -> None:
    theirs = {member.name: member.value for member in pipelining._ComputationType}
    # Newer torch says where a send is waited for; ours takes that on every torch.
    waits = {name: name for name in ("WAIT_SEND_F", "WAIT_SEND_B")}
    assert {member.name: member.value for member in _ComputationType} == theirs | waits
    assert [str(member) for member in _ComputationType] == [
        f"_ComputationType.{member.name}" for member in _ComputationType
    ]
    assert str(_ComputationType.FORWARD) == str(pipelining._ComputationType.FORWARD)
    assert all(_ComputationType.from_str(text).value == text for text in theirs.values())
    assert isinstance(_ComputationType.FORWARD, str)
    with pytest.raises(RuntimeError, match="'X' must be one of F, I, W, UNSHARD"):
        _ComputationType.from_str("X")


def test_constants_are_those_of_torch() -> None:
    for name in ("F", "I", "W", "B", *_ComputationType.__members__):
        theirs = getattr(pipelining, name, getattr(_actions, name))
        assert getattr(_actions, name).value == theirs.value
        assert name in _actions.__all__


@needs("_get_profiler_function_name")
def test_profile_names_actions_as_torch_does() -> None:
    for text in (*PLAIN, *OVERLAPS):
        theirs = pipelining._Action.from_str(text)
        expected = pipelining._get_profiler_function_name(theirs)
        assert _get_profiler_function_name(read(text)) == expected


def test_actions_survive_pickling() -> None:
    for text in (*PLAIN, *OVERLAPS):
        assert pickle.loads(pickle.dumps(read(text))) == read(text)


def test_idle_slots_are_dropped_on_the_way_to_our_own_actions() -> None:
    actions = [None, _Action(0, F, 0), None, _Action(0, I, 0), _Action(0, W, 0), None]
    assert [str(work) for work in to_works(actions)] == ["0F0", "0I0", "0W0"]
    assert to_works(actions)[0] == Action(Kind.FORWARD, 0, 0)


def test_what_has_no_form_on_the_other_side_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no sub-actions"):
        to_work(_Action(-1, OVERLAP_F_B))
    with pytest.raises(ScheduleError, match="F takes a microbatch"):
        to_work(_Action(0, F))
    with pytest.raises(ScheduleError, match="RESHARD takes no microbatch"):
        to_work(_Action(0, RESHARD, 1))
    with pytest.raises(ScheduleError, match="'0SEND_F1>3' skips stages"):
        from_work(parse_work("0SEND_F1>3"))
