"""Sharded and replicated stages: what their collectives take is measured with them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.measuring.collectives import collective_seconds, has_collectives
from penstock.measuring.stages import measure_closely
from penstock.sim.engine import simulate
from tests.processes import Processes


def shard(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(stage, mesh=mesh)
    return stage


def replicate(stage: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(stage)


def measure_stages(_rank: int, make: Callable[[nn.Module, DeviceMesh], nn.Module]) -> Costs:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    stages = [make(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), mesh) for _ in range(2)]
    x, y = torch.randn(4, 64), torch.randn(4, 64)
    # Without a warning if the machine of the tests is busy.
    found = measure_closely(stages, example=(x,), loss=nn.functional.mse_loss, target=y, repeats=3)
    return found.costs


# Each process used to end its steps when its own seconds were stable, and then one of them waited
# for ever in a collective that the other did not run any more.
@pytest.mark.parametrize(("make", "is_gathered"), [(shard, True), (replicate, False)])
def test_collectives_of_stages_are_measured(
    two_processes: Processes, make: Callable[..., nn.Module], is_gathered: bool
) -> None:
    for costs in two_processes.run(measure_stages, make, seconds=60.0):
        assert (costs.per_stage("reduce_grad", 2) > 0).all()
        for name in ("unshard", "reshard"):
            assert ((costs.per_stage(name, 2) > 0) == is_gathered).all()
        # Recorded collectives occupied their rank.
        assert costs.collective_overlap == 0


def test_the_first_forward_waits_for_what_is_still_gathered() -> None:
    schedule = lower(build("GPipe", ranks=1, microbatches=3))
    costs = Costs(forward=2, unshard=5, reshard=1, reduce_grad=7, collective_overlap=0)
    timeline = simulate(schedule, costs)
    is_first = timeline.schedule.rows.is_kind(Kind.FORWARD) & (schedule.rows.microbatch == 0)
    waited = replace(timeline, end=timeline.end + 1.5 * is_first)
    assert has_collectives([timeline])
    found = collective_seconds([timeline, waited], [True])
    assert {name: column[0].tolist() for name, column in found.items()} == {
        "unshard": [5, 6.5],
        "reshard": [1, 1],
        "reduce_grad": [7, 7],
    }
    # Nothing is gathered for a copy: its first forward is slow for other reasons.
    assert collective_seconds([waited], [False])["unshard"][0].tolist() == [0]
