from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.assembly import build, lower
from penstock.dropin._schedule_visualizer import (
    OpKey,
    StagesPerRankError,
    _ComputationTypeVisual,
    action_type_to_color_mapping,
    add_schedule_op_spacing,
    get_schedule_ops,
    visualize_schedule,
)
from penstock.dropin.names.actions import F, _Action, _ComputationType
from penstock.dropin.names.lists import Order, Slots
from penstock.dropin.orders.tables import build_order
from penstock.dropin.schedules import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
)
from penstock.errors import ArgumentError, ScheduleNameError, SizeError
from penstock.schedules.registry import FAMILIES
from tests.covering import all_but_slow
from tests.dropin.incumbent import needs, read_order
from tests.strategies import FAMILY_NAMES

torch_visualizer: Any = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

SINGLE = [name for name in FAMILY_NAMES if FAMILIES[name].stages_per_rank == 1]
MULTI = [name for name in FAMILY_NAMES if name not in SINGLE]
TORCH_MULTI = [
    *("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
]


def texts(ops: list[Any]) -> list[list[str]]:
    return [[str(slot) for slot in slots] for slots in ops]


def without_idle(ops: list[Slots]) -> list[list[_Action]]:
    return [[slot for slot in slots if slot is not None] for slots in ops]


@pytest.mark.parametrize("with_comms", [False, True])
@pytest.mark.parametrize("name", TORCH_MULTI)
def test_actions_are_those_of_torch(name: str, with_comms: bool) -> None:
    for ranks, microbatches in ((1, 2), (2, 4), (3, 6), (4, 8)):
        expected = torch_visualizer.get_schedule_ops(
            schedule=name, pp_degree=ranks, num_microbatches=microbatches, with_comms=with_comms
        )
        found = get_schedule_ops(
            schedule=name, pp_degree=ranks, num_microbatches=microbatches, with_comms=with_comms
        )
        assert texts(found) == texts(expected)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_schedules_of_one_stage_per_rank_are_shown_in_every_way(name: str) -> None:
    """Torch shows only the plain list of these."""
    schedule = build(name, ranks=3, microbatches=4)
    compute = [[str(work) for work in order] for order in schedule.orders]
    plain = get_schedule_ops(name, 3, 4)
    assert texts(plain) == [[*order, f"{rank}REDUCE_GRAD"] for rank, order in enumerate(compute)]
    assert without_idle(get_schedule_ops(name, 3, 4, add_spacing=True)) == plain
    lowered = lower(schedule)
    assert texts(get_schedule_ops(name, 3, 4, with_comms=True)) == texts(list(lowered.orders))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_family_comes_plain_spaced_and_lowered(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    plain = get_schedule_ops(name, 4, 8)
    assert plain == list(build_order(name, 4, 8).values())
    spaced = get_schedule_ops(name, 4, 8, add_spacing=True)
    assert without_idle(spaced) == without_idle(plain)
    lowered = get_schedule_ops(name, 4, 8, with_comms=True)
    assert texts(lowered) == texts(list(lower(schedule).orders))


@needs("_defer_recv_ops")
@pytest.mark.parametrize("name", TORCH_MULTI)
def test_late_receives_are_shown_where_torch_shows_them(name: str) -> None:
    for ranks, microbatches in ((1, 2), (2, 4), (3, 6), (4, 8)):
        given = {"schedule": name, "pp_degree": ranks, "num_microbatches": microbatches}
        expected = torch_visualizer.get_schedule_ops(**given, with_comms=True, defer_pp_recv=True)
        found = get_schedule_ops(name, ranks, microbatches, with_comms=True, defer_pp_recv=True)
        assert texts(found) == texts(expected)


def test_late_receives_stand_right_before_their_use_on_the_last_rank() -> None:
    ops = get_schedule_ops("Interleaved1F1B", 2, 4, with_comms=True, defer_pp_recv=True)
    last = without_idle(ops)[1]
    uses = {"RECV_F": "F", "RECV_B": "B"}
    for receive, use in pairwise(last):
        if (name := receive.computation_type.value) in uses:
            expected = f"{receive.stage_index}{uses[name]}{receive.microbatch_index}"
            assert str(use) == expected


def test_names_are_taken_in_any_case_and_classes_by_their_name() -> None:
    expected = get_schedule_ops("ZBVZeroBubble", 2, 4)
    assert get_schedule_ops("zbvzerobubble", 2, 4) == expected
    assert get_schedule_ops("ScheduleZBVZeroBubble", 2, 4) == expected
    assert get_schedule_ops(ScheduleZBVZeroBubble, 2, 4) == expected


def test_class_derived_from_one_of_torchs_has_the_same_actions() -> None:
    class Derived(ScheduleInterleaved1F1B):
        """Under a name that nobody knows."""

    assert get_schedule_ops(Derived, 2, 4) == get_schedule_ops("Interleaved1F1B", 2, 4)


class SingleOfMine(ScheduleGPipe):
    def _get_pipeline_order(self) -> Order:
        assert (self._num_stages, self._n_microbatches) == (2, 1)
        return read_order("0F0 . 0B0", "1F0 1B0")


class MultiOfMine(_PipelineScheduleRuntime):
    def __init__(self, stages: list[Any], n_microbatches: int) -> None:
        super().__init__(stages=stages, n_microbatches=n_microbatches)
        assert (self._num_stages, self.pp_group_size, n_microbatches) == (4, 2, 1)
        self.pipeline_order = read_order("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")


class NothingOfMine(_PipelineScheduleRuntime):
    """Sets no order."""


def test_class_of_ones_own_is_made_with_placeholder_stages() -> None:
    assert get_schedule_ops(SingleOfMine, 2, 1) == list(
        read_order("0F0 . 0B0", "1F0 1B0").values()
    )
    assert get_schedule_ops(MultiOfMine, 2, 1, add_spacing=True) == list(
        read_order("0F0 . . 3F0 3B0 . . . . 0B0", ". 1F0 2F0 . . . 2B0 1B0 . .").values()
    )
    lowered = get_schedule_ops(MultiOfMine, 2, 1, with_comms=True)
    assert [len(slots) for slots in lowered] == [14, 14]
    with pytest.raises(AssertionError, match="SingleOfMine takes exactly 1 stage per rank"):
        get_schedule_ops(SingleOfMine, 2, 1, num_stages_per_rank=2)
    with pytest.raises(ArgumentError, match="NothingOfMine sets no pipeline_order"):
        get_schedule_ops(NothingOfMine, 2, 1)
    with pytest.raises(ValueError, match="dict is not a schedule"):
        get_schedule_ops(dict, 2, 1)


def test_spacing_and_communication_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="spacing and communication exclude each other"):
        get_schedule_ops("1F1B", 2, 4, add_spacing=True, with_comms=True)


@pytest.mark.parametrize("name", SINGLE)
def test_single_stage_schedules_refuse_more_stages(name: str) -> None:
    message = r"exactly 1 stage per rank \(num_stages_per_rank: 2\)"
    with pytest.raises(StagesPerRankError, match=message) as caught:
        get_schedule_ops(name, 4, 8, num_stages_per_rank=2)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, SizeError)


@pytest.mark.parametrize("name", MULTI)
def test_multi_stage_schedules_refuse_a_single_stage(name: str) -> None:
    message = r"at least 2 stages per rank \(num_stages_per_rank: 1\)"
    with pytest.raises(StagesPerRankError, match=message):
        get_schedule_ops(name, 4, 8, num_stages_per_rank=1)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleNameError, match="1F1B"):
        get_schedule_ops("2F2B", 4, 8)


def test_key_names_an_operation() -> None:
    key = OpKey(stage_index=1, computation_type=F, microbatch_index=2)
    assert key == (1, F, 2)


def test_every_type_has_a_colour_a_text_and_a_width() -> None:
    assert set(action_type_to_color_mapping) == set(_ComputationType)
    theirs = torch_visualizer.action_type_to_color_mapping
    for kind, visual in theirs.items():
        assert action_type_to_color_mapping[_ComputationType(kind.value)].width == visual.width
    visual = _ComputationTypeVisual("blue")
    assert (visual.color, visual.text, visual.width) == ("blue", "", 1)


@pytest.mark.parametrize("name", all_but_slow(FAMILY_NAMES, ["1F1B", "ZBV", "DualPipeV"]))
def test_every_schedule_can_be_drawn(name: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.png"
    visualize_schedule(get_schedule_ops(name, 2, 4, add_spacing=True), str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_lowered_and_unspaced_schedules_can_be_drawn(tmp_path: Path) -> None:
    for ops in (
        get_schedule_ops("ZBVZeroBubble", 2, 4, with_comms=True),
        get_schedule_ops("Interleaved1F1B", 2, 4),
        add_schedule_op_spacing(get_schedule_ops("DualPipeV", 2, 4)),
    ):
        file = tmp_path / "schedule.svg"
        visualize_schedule(ops, str(file))
        assert file.read_bytes().startswith(b"<?xml")
