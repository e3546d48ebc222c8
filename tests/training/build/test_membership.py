"""Processes outside a pipeline's group, and pipelines that lack one by mistake."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.errors import ArgumentError
from penstock.measuring import MeasurementWarning
from tests.processes import Processes

FORGOTTEN = (
    "2 processes were started, but without group= each of them runs all ranks and trains its own "
    "model; give group=torch.distributed.group.WORLD, or ranks= if that is what you want"
)


def make_stages() -> list[nn.Module]:
    return [nn.Linear(2, 2), nn.Linear(2, 2)]


def warned(stages: list[nn.Module], ranks: int | None = None) -> list[str]:
    """Return what is said about a pipeline that runs all of its ranks here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.Pipeline(stages, "1F1B", microbatches=2, loss=nn.MSELoss(), ranks=ranks)
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def build_without_group(_: int) -> list[list[str]]:
    replica: list[nn.Module] = [DistributedDataParallel(stage) for stage in make_stages()]
    shard = make_stages()
    fully_shard(shard[0])
    return [
        warned(make_stages()),
        warned(make_stages(), ranks=2),
        warned(replica),
        warned(shard),
    ]


# Every process trained a model of its own on the batch of its own, and said nothing.
def test_pipeline_without_a_group_among_several_processes_warns(
    two_processes: Processes,
) -> None:
    warned = two_processes.run(build_without_group)
    # A number of ranks says that it is meant, and so do replicas that share their gradients.
    assert warned == [[[FORGOTTEN], [], [], []]] * 2


def test_torchrun_is_noticed_before_processes_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert warned(make_stages()) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert warned(make_stages()) == []
    monkeypatch.setenv("RANK", "0")
    assert warned(make_stages()) == [FORGOTTEN]
    assert warned(make_stages(), ranks=2) == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert warned(make_stages()) == []
    assert not dist.is_initialized()
    assert os.environ["RANK"] == "0"


def measure_alone(_: int) -> ps.Costs:
    x = torch.ones(4, 2)
    # The machine of the tests may be busy.
    warnings.simplefilter("ignore", MeasurementWarning)
    return ps.measure(make_stages(), example=(x,), loss=nn.MSELoss(), target=x, repeats=1)


def test_measuring_in_one_of_several_processes_does_not_warn(two_processes: Processes) -> None:
    first, second = two_processes.run(measure_alone)
    assert first.parameter_bytes == second.parameter_bytes == (24, 24)


def build_outside(rank: int) -> list[str]:
    """Return what a process says that is given a group, and a mesh, of the other one alone."""
    group, mesh = dist.new_group([1]), DeviceMesh("cpu", [1])
    said = []
    for given in (group, mesh):
        if rank == 0:
            with pytest.raises(ArgumentError) as caught:
                ps.Pipeline([nn.Linear(2, 2)], "1F1B", microbatches=2, group=given)
            said.append(str(caught.value))
    return said


# The error was "ValueError: 0 is not in list", from inside.
def test_process_outside_the_group_gets_an_error_that_names_its_members(
    two_processes: Processes,
) -> None:
    start = "this process must be in the group that it was given (rank 0 of 2, "
    end = "); build the pipeline only on processes of its group"
    assert two_processes.run(build_outside) == [
        [
            f"{start}ranks of the last one made without this process: [1]{end}",
            f"{start}ranks: [1]{end}",
        ],
        [],
    ]
