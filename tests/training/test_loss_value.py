"""Losses that a device has not computed yet, and how ranks share them."""

import gc
import os
import pickle
import signal
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from weakref import ref

import pytest
import torch
import torch.distributed as dist

import penstock as ps
from penstock.alive.guard import NoGuard
from penstock.alive.guard_opening import open_guard
from penstock.errors import PeerLostError, PipelineError
from penstock.ranks.control import GroupControl
from penstock.ranks.group_transport import GroupTransport
from penstock.training.loss_value import LossCopy, LossExchange, SharedLoss
from tests.alive.fault_ranks import run_ranks
from tests.processes import Processes


class Device:
    """Fills in losses when the host waits for them, and not before it may."""

    def __init__(self, losses: Sequence[float], *, is_ready: bool = True) -> None:
        self.losses = losses
        self.may_finish = Event()
        if is_ready:
            self.may_finish.set()
        self.values = torch.full((len(losses),), torch.nan, dtype=torch.float64)

    def synchronize(self) -> None:
        self.may_finish.wait()
        self.values.copy_(torch.tensor(self.losses))

    def copy(self) -> LossCopy:
        """Return the losses, of which the first counts once and the others half."""
        return LossCopy(self.values, [1.0, *[0.5] * (len(self.losses) - 1)], self)


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("device-side assert triggered")


class Counted:
    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def read(self) -> float:
        self.reads += 1
        return self.value


# ---- one process


def test_losses_are_read_after_the_device_has_written_them() -> None:
    copy = Device([1.0, 2.0, 4.0]).copy()
    assert copy.read() == 4.0
    assert copy.read() == 4.0


def test_step_result_reads_its_loss_once_and_only_when_asked() -> None:
    value = Counted(0.25)
    result = ps.StepResult(value, {"logits": 3})
    assert value.reads == 0
    assert (result.loss, result.loss, value.reads) == (0.25, 0.25, 1)
    assert repr(ps.StepResult(Counted(0.25))) == "StepResult(loss=0.25)"
    assert ps.StepResult(Counted(0.25)) == ps.StepResult(0.25)
    assert ps.StepResult(Counted(0.25)) != ps.StepResult(0.5)
    assert pickle.loads(pickle.dumps(ps.StepResult(Device([1.0]).copy()))).loss == 1.0


# ---- two ranks


def open_exchange() -> LossExchange:
    world = dist.group.WORLD
    assert world is not None
    return LossExchange(lambda: GroupControl(world), NoGuard())


def share_while_devices_work(rank: int) -> dict[str, list[float]]:
    """Rank 1 holds the losses of five steps, and computes none before all were shared."""
    exchange = open_exchange()
    devices = [Device([float(step), 2.0], is_ready=False) for step in range(5)]
    shared: list[SharedLoss | None] = []
    for step, device in enumerate(devices):
        shared.append(exchange.share(0.25 * step, device.copy() if rank == 1 else None))
    dropped = [ref(device) for device in devices[1:3]]
    shared[1] = shared[2] = None
    for device in devices:
        device.may_finish.set()
    del devices, device
    found: dict[str, list[float]] = {"unread": [], "read": []}
    if rank == 0:
        # Late, and not in order; rank 1 does not read them at all.
        found["read"] = [one.read() for one in reversed(shared) if one is not None]
    exchange.close()
    gc.collect()
    found["unread"] = [1.0 for device in dropped if device() is not None]
    return found


def test_sharing_does_not_wait_for_a_device_and_any_rank_may_read_late_or_never(
    two_processes: Processes,
) -> None:
    first, second = two_processes.run(share_while_devices_work)
    assert first == {"read": [6.0, 4.75, 1.0], "unread": []}
    assert second == {"read": [], "unread": []}


def share_from_both(rank: int) -> list[float]:
    exchange = open_exchange()
    shared = [exchange.share(0.0, Device([rank + 1.0]).copy()) for _ in range(2)]
    exchange.close()
    # Fetched before closing.
    return [one.read() for one in shared]


def test_parts_of_several_ranks_add_up_and_are_known_after_closing(
    two_processes: Processes,
) -> None:
    assert two_processes.run(share_from_both) == [[3.0, 3.0]] * 2


def share_from_broken_device(rank: int) -> list[str]:
    exchange = open_exchange()
    copy = LossCopy(torch.zeros(1), [1.0], Broken()) if rank == 1 else None
    failed, well = exchange.share(0.0, copy), exchange.share(2.0, None)
    with pytest.raises(PipelineError) as caught:
        failed.read()
    cause = [] if caught.value.__cause__ is None else [str(caught.value.__cause__)]
    return [str(caught.value), *cause, str(well.read())]


def test_a_loss_that_cannot_be_fetched_is_an_error_wherever_it_is_read(
    two_processes: Processes,
) -> None:
    message = "rank 1 could not fetch its part of the loss from its device; its own error says why"
    assert two_processes.run(share_from_broken_device) == [
        [message, "2.0"],
        [message, "device-side assert triggered", "2.0"],
    ]


def close_too_early(rank: int) -> str:
    exchange = open_exchange()
    device = Device([1.0], is_ready=False)
    shared = exchange.share(0.0, device.copy() if rank == 1 else None)
    # Both are connected by now. Rank 1 is the one that cannot wait; rank 0 hears of it.
    dist.barrier()
    exchange.close(60.0 if rank == 0 else 0.0)
    device.may_finish.set()
    try:
        return str(shared.read())
    except PipelineError as error:
        return str(error)


def test_a_loss_that_comes_too_late_for_closing_is_an_error(two_processes: Processes) -> None:
    first, second = two_processes.run(close_too_early)
    assert first.startswith("rank 1 of 2 is gone: ")
    assert second == (
        "the pipeline was closed before the loss of this step was known; read losses before "
        "closing it"
    )


# ---- lost ranks


def wait_for_lost_rank(rank: int, number: int, folder: Path) -> float:
    world = dist.group.WORLD
    assert world is not None
    silence = 7.0 if number == signal.SIGSTOP else 60.0
    guard = open_guard(world, (), ps.Timeouts(silence_seconds=silence, folder=folder))
    with guard.call():
        transport = GroupTransport(world, torch.device("cpu"))
        guard.attach(transport, ps.build("1F1B", ranks=2, microbatches=2))
    exchange = LossExchange(lambda: GroupControl(world), guard)
    assert exchange.share(0.0, Device([1.0]).copy() if rank == 1 else None).read() == 1.0
    if rank == 1:
        os.kill(os.getpid(), number)
    return exchange.share(0.0, None).read()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_who_waits_for_the_loss_of_a_lost_rank_learns_its_name(
    number: signal.Signals, tmp_path: Path
) -> None:
    resume = 1 if number == signal.SIGSTOP else None
    first, _ = run_ranks(wait_for_lost_rank, 2, tmp_path, number, tmp_path, resume=resume)
    assert isinstance(first.reported, PeerLostError), first
    assert first.reported.rank == 1
    what = {
        signal.SIGKILL: "ended (its connection broke)",
        signal.SIGSTOP: "has not answered for 7 s",
    }
    assert what[number] in str(first.reported)
