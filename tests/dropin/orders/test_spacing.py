import pytest

from penstock.assembly import build
from penstock.dropin._schedule_visualizer import add_schedule_op_spacing, get_schedule_ops
from penstock.dropin.names.actions import FORWARD, FULL_BACKWARD, WAIT_SEND_F, _Action
from penstock.dropin.names.lists import Slots
from penstock.dropin.orders.slots import read_timeline
from penstock.errors import DeadlockError, ScheduleError
from penstock.ir.actions import Action, Kind
from penstock.ir.text import parse_work
from tests.dropin.incumbent import read_order
from tests.strategies import FAMILY_NAMES


def table(*lines: str) -> list[Slots]:
    return list(read_order(*lines).values())


def actions_of(entry: _Action) -> tuple[_Action, ...]:
    return entry.sub_actions or (entry,)


def width(entry: _Action | None) -> int:
    if entry is None:
        return 1
    return sum(2 if action.computation_type.value == "B" else 1 for action in actions_of(entry))


def spans(slots: list[Slots]) -> dict[str, tuple[int, int, int]]:
    """Return, by action, its rank and the slots in which it starts and ends."""
    found = {}
    for rank, row in enumerate(slots):
        clock = 0
        for entry in row:
            for action in actions_of(entry) if entry is not None else ():
                found[str(action)] = (rank, clock, clock + width(entry))
            clock += width(entry)
    return found


def test_one_f_one_b_with_spacing() -> None:
    plain = [
        [entry for entry in slots if entry and entry.is_compute_op]
        for slots in get_schedule_ops("1F1B", 4, 5)
    ]
    assert add_schedule_op_spacing(plain) == table(
        "0F0 0F1 0F2 0F3  .   .   .   .   .   .   0B0   0F4  0B1  . 0B2 . 0B3 . 0B4",
        " .  1F0 1F1 1F2  .   .   .   .  1B0   1F3   1B1 1F4  1B2  . 1B3 . 1B4 . .",
        " .   .  2F0 2F1  .   .  2B0   2F2   2B1  2F3    2B2 2F4   2B3 . 2B4 . . . .",
        " .   .   .  3F0 3B0   3F1   3B1   3F2   3B2 3F3   3B3   3F4 3B4 . . . . . .",
    )


def test_reduction_takes_a_slot_too() -> None:
    assert get_schedule_ops("GPipe", 2, 1, add_spacing=True) == table(
        "0F0 . . . 0B0 0REDUCE_GRAD",
        ". 1F0 1B0 1REDUCE_GRAD . .",
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


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12)])
def test_spaced_actions_stay_on_their_rank_and_start_after_what_they_need(
    name: str, ranks: int, microbatches: int
) -> None:
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    ops = get_schedule_ops(name, ranks, microbatches, add_spacing=True)
    plain = [[str(entry) for entry in row if entry and entry.is_compute_op] for row in ops]
    assert plain == [[str(work) for work in order] for order in schedule.orders]
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
    """Return what an action waits for, computed in another way than in the library."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD:
            return [f"{a}F{microbatch}" for a, b in edges if b == stage]
        case Kind.BACKWARD_WEIGHT:
            return [f"{stage}I{microbatch}"]
        case Kind.REDUCE_GRAD:
            return [text for text in found if text.startswith(f"{stage}B")]
        case _:
            after = [f"{b}{kind}{microbatch}" for a, b in edges if a == stage for kind in "IB"]
            return [f"{stage}F{microbatch}", *(text for text in after if text in found)]


def test_deadlock_is_reported() -> None:
    with pytest.raises(RuntimeError, match="never finishes; 0B0 waits for 1B0, 1F1") as caught:
        add_schedule_op_spacing(table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert isinstance(caught.value, DeadlockError)


def test_missing_action_is_reported_with_who_needs_it() -> None:
    with pytest.raises(ScheduleError, match="rank 1, position 0, 1F0"):
        add_schedule_op_spacing(table("0F1 0B1", "1F0 1F1 1B1 1B0"))


def test_nothing_to_space_stays_nothing() -> None:
    assert add_schedule_op_spacing([]) == []
    assert add_schedule_op_spacing([[None], []]) == [[], []]


def test_waits_for_sends_take_a_slot_and_are_not_drawn() -> None:
    """Torch's newer orders have them; their kinds had no width, so that no list could be drawn."""
    order = [_Action(0, kind, 0) for kind in (FORWARD, WAIT_SEND_F, FULL_BACKWARD)]
    timeline = read_timeline([order])
    assert timeline.start.tolist() == [0.0, 2.0]
    assert timeline.end.tolist() == [1.0, 4.0]
