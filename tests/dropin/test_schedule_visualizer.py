from pathlib import Path

import pytest

from penstock.assembly import build, lower
from penstock.dropin._schedule_visualizer import (
    OpKey,
    _ComputationTypeVisual,
    action_type_to_color_mapping,
    add_schedule_op_spacing,
    get_schedule_ops,
    visualize_schedule,
)
from penstock.errors import ScheduleError, ScheduleNameError, SizeError
from penstock.ir.actions import Action, Kind, Overlap, Work
from penstock.ir.text import parse_work
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.schedules.registry import FAMILIES
from penstock.schedules.v_shape import zbv

SINGLE = [name for name, family in FAMILIES.items() if family.stages_per_rank == 1]
MULTI = [name for name in FAMILIES if name not in SINGLE]


def table(*lines: str) -> list[list[Work | None]]:
    """Every rank's slots from a line of text each; a dot is an idle slot."""
    cells = [line.replace(")", ")OVERLAP_F_B").split() for line in lines]
    return [[None if cell == "." else parse_work(cell) for cell in row] for row in cells]


def actions_of(entry: Work) -> tuple[Action, ...]:
    return entry.actions if isinstance(entry, Overlap) else (entry,)


def width(entry: Work | None) -> int:
    if entry is None:
        return 1
    return sum(2 if a.kind is Kind.FULL_BACKWARD else 1 for a in actions_of(entry))


def spans(slots: list[list[Work | None]]) -> dict[str, tuple[int, int, int]]:
    """By action, its rank and the slots in which it starts and ends."""
    found = {}
    for rank, row in enumerate(slots):
        clock = 0
        for entry in row:
            for action in actions_of(entry) if entry is not None else ():
                found[str(action)] = (rank, clock, clock + width(entry))
            clock += width(entry)
    return found


def test_one_f_one_b_with_spacing() -> None:
    ops = get_schedule_ops("1F1B", 4, 5, add_spacing=True)
    assert ops == table(
        "0F0 0F1 0F2 0F3  .   .   .   .   .   .   0B0   0F4  0B1  . 0B2 . 0B3 . 0B4",
        " .  1F0 1F1 1F2  .   .   .   .  1B0   1F3   1B1 1F4  1B2  . 1B3 . 1B4 . .",
        " .   .  2F0 2F1  .   .  2B0   2F2   2B1  2F3    2B2 2F4   2B3 . 2B4 . . . .",
        " .   .   .  3F0 3B0   3F1   3B1   3F2   3B2 3F3   3B3   3F4 3B4 . . . . . .",
    )


def test_overlapped_pair_takes_the_slots_of_both() -> None:
    spaced = add_schedule_op_spacing(table("0F0 (0F1;0B0) 0B1", "1F0 1B0 1F1 1B1"))
    assert spaced == table(
        "0F0  .   .   .   (0F1;0B0)   .   .   .  0B1",
        " .  1F0 1B0       .  .  .   1F1 1B1      .  . ",
    )


def test_spacing_replaces_idle_slots_that_are_already_there() -> None:
    order = table(". 0F0 . . 0B0", "1F0 . 1B0")
    assert add_schedule_op_spacing(order) == table("0F0 . . . 0B0", ". 1F0 1B0 . .")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12)])
def test_spaced_actions_stay_on_their_rank_and_start_after_what_they_need(
    name: str, ranks: int, microbatches: int
) -> None:
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    ops = get_schedule_ops(name, ranks, microbatches, add_spacing=True)
    plain = [[entry for entry in row if entry is not None] for row in ops]
    assert plain == [list(order) for order in schedule.orders]
    assert len({sum(map(width, row)) for row in ops}) == 1

    found = spans(ops)
    for text, (_, start, _) in found.items():
        action = parse_work(text)
        assert isinstance(action, Action)
        for need in needs_of(action, found, schedule.dataflow.edges):
            assert found[need][2] <= start


def needs_of(
    action: Action, found: dict[str, tuple[int, int, int]], edges: tuple[tuple[int, int], ...]
) -> list[str]:
    """What an action waits for, said once more and in another way than the library does."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD:
            return [f"{a}F{microbatch}" for a, b in edges if b == stage]
        case Kind.BACKWARD_WEIGHT:
            return [f"{stage}I{microbatch}"]
        case _:
            after = [f"{b}{kind}{microbatch}" for a, b in edges if a == stage for kind in "IB"]
            return [f"{stage}F{microbatch}", *(text for text in after if text in found)]


def test_deadlock_is_reported() -> None:
    with pytest.raises(RuntimeError, match="deadlock"):
        add_schedule_op_spacing(table("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1"))


def test_missing_action_is_reported_with_who_needs_it() -> None:
    with pytest.raises(ScheduleError, match="rank 1, position 0, 1F0"):
        add_schedule_op_spacing(table("0F1 0B1", "1F0 1F1 1B1 1B0"))


def test_nothing_to_space_stays_nothing() -> None:
    assert add_schedule_op_spacing([]) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_default_stages_per_rank_is_one_for_single_and_two_for_multi_schedules(name: str) -> None:
    ops = get_schedule_ops(name, 4, 8)
    stages = {
        action.stage for row in ops for entry in row if entry for action in actions_of(entry)
    }
    assert len(stages) == (4 if name in SINGLE else 8)


def test_schedule_can_be_given_by_torch_name_in_any_case_or_by_function() -> None:
    expected = [list(order) for order in build("ZBV", ranks=2, microbatches=4).orders]
    assert get_schedule_ops("zbvzerobubble", 2, 4) == expected
    assert get_schedule_ops("ScheduleZBVZeroBubble", 2, 4) == expected
    assert get_schedule_ops(zbv, 2, 4) == expected
    assert get_schedule_ops(one_f_one_b, 2, 4) == get_schedule_ops("1F1B", 2, 4)


@pytest.mark.parametrize("defer", [False, True])
def test_communication_is_that_of_lowering(defer: bool) -> None:
    ops = get_schedule_ops("Interleaved1F1B", 2, 4, with_comms=True, defer_pp_recv=defer)
    schedule = build("Interleaved1F1B", ranks=2, microbatches=4)
    lowered = lower(schedule, receives="late" if defer else "early")
    assert ops == [list(order) for order in lowered.orders]


def test_spacing_and_communication_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="spacing and communication exclude each other"):
        get_schedule_ops("1F1B", 2, 4, add_spacing=True, with_comms=True)


@pytest.mark.parametrize("name", SINGLE)
def test_single_stage_schedules_refuse_more_stages(name: str) -> None:
    with pytest.raises(SizeError, match=r"exactly 1 stage per rank \(num_stages_per_rank: 2\)"):
        get_schedule_ops(name, 4, 8, num_stages_per_rank=2)


@pytest.mark.parametrize("name", MULTI)
def test_multi_stage_schedules_refuse_a_single_stage(name: str) -> None:
    with pytest.raises(SizeError, match=r"at least 2 stages per rank \(num_stages_per_rank: 1\)"):
        get_schedule_ops(name, 4, 8, num_stages_per_rank=1)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleNameError, match="1F1B"):
        get_schedule_ops("2F2B", 4, 8)


def test_key_names_an_operation() -> None:
    key = OpKey(stage_index=1, computation_type=Kind.FORWARD, microbatch_index=2)
    assert key == (1, Kind.FORWARD, 2)


def test_every_kind_has_a_colour_a_text_and_a_width() -> None:
    assert list(action_type_to_color_mapping) == list(Kind)
    widths = {kind: visual.width for kind, visual in action_type_to_color_mapping.items()}
    assert widths == {kind: 2 if kind is Kind.FULL_BACKWARD else 1 for kind in Kind}
    visual = _ComputationTypeVisual("blue")
    assert (visual.color, visual.text, visual.width) == ("blue", "", 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_can_be_drawn(name: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.png"
    visualize_schedule(get_schedule_ops(name, 2, 4, add_spacing=True), str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_lowered_schedule_can_be_drawn(tmp_path: Path) -> None:
    file = tmp_path / "schedule.svg"
    visualize_schedule(get_schedule_ops("ZBV", 2, 4, with_comms=True), str(file))
    assert file.read_bytes().startswith(b"<?xml")
