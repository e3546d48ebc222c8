"""What ranks tell each other as plain data."""

import pytest
import torch
import torch.distributed as dist

import penstock as ps
from penstock.runtime.group_transport import GroupTransport
from penstock.runtime.transport import LocalTransport
from penstock.training.agreement import agree, gather_values
from tests.processes import Processes


def open_transport() -> GroupTransport:
    group = dist.group.WORLD
    assert group is not None
    return GroupTransport(group, torch.device("cpu"))


def gather_of_different_length(rank: int) -> list[object]:
    return gather_values(open_transport(), {"rank": rank, "text": "ü" * 100 * rank, "none": None})


def test_values_of_different_length_reach_every_rank_in_order(four_processes: Processes) -> None:
    expected = [{"rank": rank, "text": "ü" * 100 * rank, "none": None} for rank in range(4)]
    assert four_processes.run(gather_of_different_length) == [expected] * 4


def test_one_process_gathers_its_own_value() -> None:
    assert gather_values(LocalTransport(4), [1, 2.5, "x"]) == [[1, 2.5, "x"]]


def disagree(rank: int) -> str:
    transport = open_transport()
    agree(transport, {"colour": "blue", "size": 3})
    with pytest.raises(ps.PipelineError) as caught:
        agree(transport, {"colour": "blue", "size": rank})
    return str(caught.value)


def test_difference_is_named_on_every_rank(two_processes: Processes) -> None:
    message = "the ranks differ in their size (rank 0: 0, rank 1: 1); use the same on all"
    assert two_processes.run(disagree) == [message, message]
