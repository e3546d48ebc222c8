"""Passes that recompute or offload what forwards save."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ArgumentError, ScheduleError
from penstock.passes import add_offload, add_recompute
from tests.strategies import dag_schedules, schedules, with_memory_actions
from tests.tables import read_schedule

ORDER = "0F0 0F1 0F2 0B0 0B1 0B2"


def words(schedule: ps.Schedule) -> str:
    return " ".join(map(str, schedule.order(0)))


def test_recompute_comes_right_before_the_backward() -> None:
    changed = add_recompute(read_schedule(ORDER), [(0, 2), (0, 0)])
    assert words(changed) == "0F0 0F1 0F2 0RECOMPUTE0 0B0 0B1 0RECOMPUTE2 0B2"


def test_recompute_comes_before_an_overlap_that_holds_the_backward() -> None:
    overlapped = read_schedule("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert words(add_recompute(overlapped, [(0, 0)])) == (
        "0F0 0RECOMPUTE0 (0F1;0B0)OVERLAP_F_B 0B1"
    )


@pytest.mark.parametrize(
    ("behind", "ahead", "expected"),
    [
        (0, 0, "0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0B0 0B1 0B2"),
        (1, 1, "0F0 0F1 0OFFLOAD0 0RELOAD0 0F2 0B0 0B1 0B2"),
        (9, 9, "0F0 0F1 0F2 0OFFLOAD0 0RELOAD0 0B0 0B1 0B2"),
    ],
)
def test_offload_ends_behind_its_forward_and_reload_begins_ahead_of_its_backward(
    behind: int, ahead: int, expected: str
) -> None:
    found = add_offload(read_schedule(ORDER), [(0, 0)], behind=behind, ahead=ahead)
    assert words(found) == expected


def test_all_pairs_with_enough_compute_in_between_are_offloaded_by_default() -> None:
    schedule = read_schedule("0F0 0F1 0F2 0B2 0B0 0B1")
    assert words(add_offload(schedule)) == (
        "0F0 0F1 0OFFLOAD0 0F2 0OFFLOAD1 0RELOAD0 0B2 0RELOAD1 0B0 0B1"
    )


def test_pairs_that_do_not_exist_or_are_taken_are_refused() -> None:
    schedule = add_recompute(read_schedule(ORDER), [(0, 1)])
    for pairs in ([(0, 3)], [(1, 0)], [(0, 1)]):
        with pytest.raises(ScheduleError, match="must run microbatch"):
            add_offload(schedule, pairs)
    with pytest.raises(ArgumentError, match="behind and ahead must be at least 0"):
        add_offload(schedule, behind=-1)


@given(st.data())
def test_any_choice_keeps_a_schedule_complete_through_text_and_lowering(
    data: st.DataObject,
) -> None:
    trained = (schedules(max_ranks=4, max_microbatches=4) | dag_schedules(max_ranks=3)).filter(
        lambda schedule: not schedule.is_forward_only
    )
    plain = data.draw(trained)
    schedule = data.draw(with_memory_actions(plain))
    ps.check(schedule)
    lowered = ps.lower(schedule, receives=data.draw(st.sampled_from(("early", "late"))))
    ps.check(lowered, channels="shared")
    for changed in (schedule, lowered):
        again = ps.Schedule.from_orders(
            [map(str, order) for order in changed.orders], dataflow=changed.dataflow
        )
        assert again == changed
    for before, order, after in zip(plain.orders, schedule.orders, lowered.orders, strict=True):
        assert [work for work in order if not is_memory(work)] == list(before)
        assert [work for work in after if is_memory(work)] == [w for w in order if is_memory(w)]


def is_memory(work: object) -> bool:
    return isinstance(work, ps.Action) and work.kind.is_memory
