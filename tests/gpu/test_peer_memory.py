"""Messages through peer memory: long ones, closed pipelines, and other ways where it fails."""

import errno
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.ranks.group_transport import GroupTransport
from penstock.ranks.peer import opening
from penstock.ranks.transport import Message
from penstock.tensors.packet import Packet
from penstock.tensors.tree import flatten
from tests.gpu.problems import EQUAL, Twin, closing, make_batch, make_blocks, widths_of
from tests.models import make_stages, mean_loss
from tests.processes import Processes

pytestmark = pytest.mark.gpu

THERE = Message(is_forward=True, edge=0, microbatch=0, source=0, destination=1)
AGAIN = Message(is_forward=True, edge=0, microbatch=1, source=0, destination=1)


def expect_peer_memory(device: torch.device) -> str:
    return "peer memory" if device.type == "cuda" else "gloo"


def send_long(rank: int, device: torch.device) -> list[bool]:
    """Messages longer and shorter than the first ring, before and after it has grown."""
    group = dist.group.WORLD
    assert group is not None
    transport = GroupTransport(group, device)
    transport.open_channels({(0, 1): 2, (1, 0): 2})
    assert set(transport.routes.values()) == {expect_peer_memory(device)}
    right = []
    for step, count in enumerate([3_000_001, 3_000_001, 3_000_001, 40, 9_000_000, 9_000_000]):
        transport.begin_step(str(count).encode())
        values = {
            m: torch.arange(count, device=device) * (step + 1) + m.microbatch
            for m in (THERE, AGAIN)
        }
        for message, value in values.items():
            if rank == 0:
                transport.send(message, Packet(*flatten(value)))
            else:
                transport.post_receive(message)
        if rank == 1:
            # In another order than they were sent.
            for message in (AGAIN, THERE):
                (found,) = transport.receive(message).tensors
                right.append(bool(torch.equal(found, values[message])))
        transport.end_step()
        transport.control.gather_bytes(b"well")
        transport.remember_shapes()
    transport.close()
    return right


def test_messages_longer_than_the_ring_arrive_whole_and_in_any_order(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    assert two_ranks.run(send_long, accelerator) == [[], [True] * 12]


def build(family: str, device: torch.device, **options: object) -> tuple[Twin, ps.Pipeline]:
    ranks = dist.get_world_size()
    blocks = make_blocks(widths_of(2 * ranks, are_equal=True), device)
    pipeline = ps.Pipeline(
        make_stages(family, ranks, blocks),
        family,
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD,
        device=device,
        options=ps.RunOptions(**options),  # type: ignore[arg-type]  # as the test gives them
    )
    return Twin.of(nn.Sequential(*blocks)), pipeline


def build_again_and_again(rank: int, device: torch.device) -> list[int]:
    """The free memory of the device after each pipeline was closed."""
    del rank
    free = []
    for number in range(6):
        twin, pipeline = build("ZBV", device)
        with closing(pipeline):
            for step in range(2):
                assert twin.step(pipeline, *make_batch((8, EQUAL), step, device)) == {}
        del twin, pipeline
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        dist.barrier()
        if number >= 2:
            free.append(torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0)
    return free


def test_closed_pipelines_leave_no_memory_behind(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    for free in two_ranks.run(build_again_and_again, accelerator, seconds=120.0):
        assert free[-1] >= free[0]


def train_by(rank: int, device: torch.device, transport: str) -> tuple[set[str], bool]:
    del rank
    twin, pipeline = build("ZBV", device, transport=transport)
    with closing(pipeline):
        for step in range(3):
            assert twin.step(pipeline, *make_batch((8, EQUAL), step, device)) == {}
        kinds = set(pipeline.routes.values())
        return kinds, all(kind in repr(pipeline) for kind in kinds)


@pytest.mark.parametrize("transport", ["nccl", "peer memory"])
def test_the_transport_can_be_chosen_and_is_shown(
    two_ranks: Processes, accelerator: torch.device, transport: str
) -> None:
    if accelerator.type != "cuda":
        pytest.skip("gloo has one transport")
    assert two_ranks.run(train_by, accelerator, transport) == [({transport}, True)] * 2


def train_without_shared_memory(rank: int, device: torch.device) -> tuple[set[str], bool]:
    """Let the first rank create no file of counters, as where shared memory is full."""
    expected = pytest.warns(UserWarning, match="through peer memory")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            # A limit on the size of files would keep NCCL from its own shared memory too.
            patch.setattr(opening, "create_flags_file", refuse_to_create)
        with expected if device.type == "cuda" else nullcontext():
            twin, pipeline = build("1F1B", device)
    with closing(pipeline):
        for step in range(3):
            assert twin.step(pipeline, *make_batch((8, EQUAL), step, device)) == {}
        return set(pipeline.routes.values()), "nccl" in repr(pipeline)


def refuse_to_create(counters: int) -> str:
    raise OSError(errno.ENOSPC, f"no room for {counters} counters")


def test_ranks_that_cannot_share_memory_use_nccl_and_say_so(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    is_cuda = accelerator.type == "cuda"
    expected = ({"nccl" if is_cuda else "gloo"}, is_cuda)
    assert two_ranks.run(train_without_shared_memory, accelerator) == [expected] * 2
