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


@pytest.mark.alone
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


# ---- devices that are behind their hosts


class Slow(nn.Module):
    """Lets the device of one rank take its time, while its host continues."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            torch.cuda._sleep(int(self.seconds * 2e9))  # type: ignore[no-untyped-call]  # untyped upstream
        return x * 1.0


class WithInput(nn.Module):
    """Passes its input on beside its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x


class AddInput(nn.Module):
    """Adds what `WithInput` passed on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.slow = layer, Slow(0.3)

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.slow(self.layer(y)) + x
        return added


def evaluate_and_overwrite(rank: int, device: torch.device, transport: str) -> list[float]:
    """How far outputs are from the plain model's, if the input is overwritten after the call."""
    torch.manual_seed(0)
    first, second = (nn.Linear(EQUAL, EQUAL, device=device).double() for _ in range(2))
    stage = WithInput(first) if rank == 0 else AddInput(second)
    pipeline = ps.Pipeline(
        {rank: stage},
        "1F1B",
        microbatches=6,
        loss=mean_loss,
        group=dist.group.WORLD,
        device=device,
        options=ps.RunOptions(transport=transport if device.type == "cuda" else "auto"),  # type: ignore[arg-type]  # as parametrized
    )
    far = []
    with closing(pipeline):
        for number in range(4):
            batch, _ = make_batch((12, EQUAL), number, device)
            with torch.no_grad():
                expected = second(first(batch)) + batch
            outputs = pipeline.evaluate(batch).outputs
            batch.fill_(7.0)
            if outputs is not None:
                far.append(float((outputs - expected).abs().max()))
    return far


# The copy of a message was not ordered before what the user does after the call, so that a slow
# receiver got the next content of a buffer.
@pytest.mark.parametrize("transport", ["nccl", "peer memory"])
def test_what_was_sent_may_be_overwritten_after_the_call(
    two_ranks: Processes, accelerator: torch.device, transport: str
) -> None:
    _, far = two_ranks.run(evaluate_and_overwrite, accelerator, transport, seconds=120.0)
    assert len(far) == 4
    assert max(far) < 1e-12


def close_behind_schedule(rank: int, device: torch.device, transport: str) -> dict[str, float]:
    """Where gradients are wrong of a step that was queued when the pipeline was closed."""
    del rank
    ranks = dist.get_world_size()
    blocks = make_blocks(widths_of(ranks, are_equal=True), device)
    slow = [nn.Sequential(block, Slow(0.5)) for block in blocks]
    twin = Twin.of(nn.Sequential(*slow))
    pipeline = ps.Pipeline(
        make_stages("1F1B", ranks, list(slow)),
        "1F1B",
        microbatches=4,
        loss=mean_loss,
        reduction="mean",
        group=dist.group.WORLD,
        device=device,
        options=ps.RunOptions(transport=transport if device.type == "cuda" else "auto"),  # type: ignore[arg-type]  # as parametrized
    )
    for number in range(2):
        twin.step(pipeline, *make_batch((8, EQUAL), number, device))
    batch, target = make_batch((8, EQUAL), 3, device)
    twin.model.zero_grad(set_to_none=True)
    twin.copy.zero_grad(set_to_none=True)
    pipeline.step(batch, target=target)
    pipeline.close()
    torch.autograd.backward(mean_loss(twin.copy(batch), target))
    return twin.compare(pipeline)


# Closing waited for a limited time, and then let streams continue without their messages.
@pytest.mark.parametrize("transport", ["nccl", "peer memory"])
def test_closing_lets_the_device_finish(
    two_ranks: Processes, accelerator: torch.device, transport: str
) -> None:
    assert two_ranks.run(close_behind_schedule, accelerator, transport, seconds=120.0) == [{}, {}]


class Scale(nn.Module):
    """Multiplies by one number, whatever the size of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def send_very_long(rank: int, device: torch.device) -> list[bool]:
    """Two steps with messages of half a gigabyte in both directions."""
    numbers = 2**26 if device.type == "cuda" else 2**18
    stage = Scale().to(device)
    pipeline = ps.Pipeline(
        {rank: stage},
        "1F1B",
        microbatches=4,
        loss=lambda output, target: (output * target).sum(),
        reduction="sum",
        group=dist.group.WORLD,
        device=device,
    )
    right = []
    with closing(pipeline):
        x = torch.arange(4, device=device).view(4, 1).double().expand(4, numbers)
        for _ in range(2):
            stage.zero_grad()
            loss = pipeline.step(x, target=torch.ones_like(x)).loss
            assert stage.factor.grad is not None
            right.append(loss == float(stage.factor.grad) == 6.0 * numbers)
    del x
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return right


# Before a ring has grown a message goes in pieces; with many small ones the queue of a stream ran
# full, and both hosts waited for each other.
def test_very_long_messages_go_both_ways_in_the_first_step(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    assert two_ranks.run(send_very_long, accelerator, seconds=120.0) == [[True, True]] * 2
