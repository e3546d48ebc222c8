"""Where receives are placed: by the one lowering, for what carries the messages."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.assembly import build, lower
from penstock.dropin.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    _Action,
    _PipelineScheduleRuntime,
)
from penstock.dropin.stage import PipelineStage
from penstock.ir.schedule import Schedule
from penstock.training.step_schedules import Receives, receives_for
from tests.dropin.incumbent import read_order

RANKS = 2
MICROBATCHES = 4


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Make a group of two that is not gloo's, as NCCL's is not; it carries nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def make_stages(device: str, *indices: int, num_stages: int = 4) -> list[Any]:
    # Nothing runs, so the modules need not be on the device.
    return [
        PipelineStage(nn.Linear(2, 2), index, num_stages, torch.device(device))
        for index in indices
    ]


def lowered(family: str, receives: Receives) -> Schedule:
    return lower(build(family, ranks=RANKS, microbatches=MICROBATCHES), receives=receives)


def texts(order: Any) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in order]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_receives_over_gloo_are_early(device: str) -> None:
    assert receives_for(dist.group.WORLD, torch.device(device)) == "early"
    assert receives_for(None, torch.device(device)) == "early"


@pytest.mark.parametrize(("device", "receives"), [("cpu", "early"), ("cuda", "late")])
def test_schedules_receive_where_our_own_pipelines_do(
    group: dist.ProcessGroup, device: str, receives: Receives
) -> None:
    # On NCCL, the drop-in posted receives early, where each takes a multiprocessor as it waits.
    assert receives_for(group, torch.device(device)) == receives
    (stage,) = make_stages(device, 0, num_stages=2)
    found = Schedule1F1B(stage, MICROBATCHES)._find_lowered()
    assert found.training == lowered("1F1B", receives)
    expected = lowered("Interleaved1F1B", receives)
    stages = make_stages(device, 0, 2)
    looped = ScheduleInterleaved1F1B(stages, MICROBATCHES)
    assert texts(looped.pipeline_order_with_comms.values()) == texts(expected.orders)
    assert looped._find_lowered().training == expected
    assert looped._find_lowered().sends_may_wait
    multi = PipelineScheduleMulti(stages, MICROBATCHES)
    multi.pipeline_order = looped.pipeline_order
    assert multi._find_lowered().training == expected


@pytest.mark.usefixtures("group")
def test_receives_are_late_on_request_and_sends_may_wait_for_them() -> None:
    stages = make_stages("cpu", 0, 2)
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, defer_pp_recv=True)
    found = schedule._find_lowered()
    assert (found.training, found.sends_may_wait) == (lowered("Interleaved1F1B", "late"), True)


@pytest.mark.usefixtures("group")
def test_orders_with_messages_stay_as_the_user_gave_them() -> None:
    given = read_order(
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    )
    order: dict[int, list[_Action]] = {r: [a for a in slots if a] for r, slots in given.items()}
    stages = make_stages("cuda", 0, num_stages=2)
    taken = _PipelineScheduleRuntime(stages, 2)
    taken._prepare_schedule_with_comms(given, format="compute_comms")
    assigned = _PipelineScheduleRuntime(stages, 2, defer_pp_recv=True)
    assigned.pipeline_order_with_comms = order
    for schedule in (taken, assigned):
        found = schedule._find_lowered()
        assert texts(found.training.orders) == texts(order.values())
        assert not found.sends_may_wait
