"""The loss of a step whose numbers are still on a device: it is fetched when it is read.

The device copies a rank's losses to host memory when it gets there, and the host continues.
Where there are several ranks, a thread of each waits for that copy and gives the number to the
others:

    training thread    step 7 | step 8 | step 9 ...         result.loss waits here, if anywhere
    device                      step 7 | step 8 ...
    loss thread                        7: gather |  8: gather ...
"""

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Protocol
from weakref import finalize, ref

import torch
import torch.distributed as dist

from penstock.alive.guard import Guard
from penstock.errors import PipelineError
from penstock.ranks.control import Control, GroupControl
from penstock.step.step_data import KeptLoss

__all__ = [
    "LossCopy",
    "LossExchange",
    "LossValue",
    "Moment",
    "SharedLoss",
    "add_up",
    "are_on_device",
    "copy_losses",
    "share_losses",
]

# How long closing waits for losses that devices have not computed yet.
_CLOSE_SECONDS = 10.0
# How long it waits for the thread once its connections are aborted.
_ABORT_SECONDS = 2.0
# Whether a rank could fetch its part of the loss, and that part.
_RECORD = struct.Struct("!?d")


class LossValue(Protocol):
    """A loss that may not be known yet."""

    def read(self) -> float:
        """Return the loss; wait for it if need be."""


class Moment(Protocol):
    """A moment in the work of a device, such as a CUDA event."""

    def synchronize(self) -> None:
        """Wait until the device gets there."""


def are_on_device(losses: Sequence[tuple[KeptLoss, float]]) -> bool:
    """Whether reading these losses would make the host wait for a device."""
    return any(isinstance(loss, torch.Tensor) and loss.is_cuda for loss, _ in losses)


def add_up(losses: Sequence[tuple[KeptLoss, float]]) -> float:
    """Return the sum of losses that the host knows, each multiplied by its weight."""
    return sum(float(loss) * weight for loss, weight in losses)


def _weigh(values: torch.Tensor, weights: Sequence[float]) -> float:
    return float((values * values.new_tensor(weights)).sum())


@dataclass(frozen=True, slots=True, eq=False)
class LossCopy:
    """Losses with their weights; the values are complete once the device gets to `arrival`."""

    values: torch.Tensor
    weights: Sequence[float]
    arrival: Moment

    def read(self) -> float:
        """Wait for the values, and return their weighted sum."""
        self.arrival.synchronize()
        return _weigh(self.values, self.weights)


def copy_losses(losses: Sequence[tuple[KeptLoss, float]]) -> LossCopy:
    """Start to copy losses from a CUDA device to the host, which does not wait."""
    tensors = [loss for loss, _ in losses if isinstance(loss, torch.Tensor)]
    device = next(loss.device for loss in tensors if loss.is_cuda)
    values = torch.stack([_move(loss, device) for loss, _ in losses]).double()
    copies = torch.empty(values.shape, dtype=torch.float64, device="cpu", pin_memory=True)
    copies.copy_(values, non_blocking=True)
    # A thread that waits for a blocking event sleeps; for any other it would use up a core.
    arrival = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # upstream
    arrival.record(torch.cuda.current_stream(device))
    return LossCopy(copies, [weight for _, weight in losses], arrival)


def _move(loss: KeptLoss, device: torch.device) -> torch.Tensor:
    if isinstance(loss, torch.Tensor):
        return loss.to(device)
    return torch.full((), loss, dtype=torch.float64, device=device)


class SharedLoss:
    """A loss that the ranks' threads add up from the parts of all ranks."""

    def __init__(self, total: Future[float], guard: Guard) -> None:
        self._total = total
        # A result that is kept must not keep this rank among the others.
        self._guard = ref(guard)

    def read(self) -> float:
        """Wait until the loss is known; a rank that is lost meanwhile is named."""
        guard = self._guard()
        return self._total.result() if guard is None else guard.wait(self._total)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """One step's loss: what all ranks know of it, and this rank's part that they do not know."""

    known: float
    mine: LossValue | None
    total: Future[float]

    def run(self, control: Control) -> None:
        """Add up the parts of all ranks; whatever fails is raised by whoever reads the loss."""
        try:
            part, failure = self._fetch()
            everyone = control.gather_bytes(_RECORD.pack(failure is None, part))
            self._settle([_RECORD.unpack(data) for data in everyone], failure)
        except Exception as error:
            with suppress(InvalidStateError):
                self.total.set_exception(error)

    def _fetch(self) -> tuple[float, Exception | None]:
        try:
            return (0.0 if self.mine is None else self.mine.read()), None
        except Exception as error:
            return 0.0, error

    def _settle(self, everyone: Sequence[tuple[bool, float]], failure: Exception | None) -> None:
        failed = [rank for rank, (is_well, _) in enumerate(everyone) if not is_well]
        if failed:
            raise PipelineError(
                f"rank {failed[0]} could not fetch its part of the loss from its device; its own "
                "error says why"
            ) from failure
        self.total.set_result(self.known + sum(part for _, part in everyone))


@dataclass(slots=True)
class _LossThread:
    """The thread that adds up losses, one step after the other, in the same order on all ranks.

    It refers to nothing that would keep a pipeline alive.
    """

    control: Control
    jobs: SimpleQueue[_Job | None] = field(default_factory=SimpleQueue)
    pending: set[Future[float]] = field(default_factory=set)
    thread: Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = Thread(target=self._run, name="penstock-loss", daemon=True)
        self.thread.start()

    def add(self, job: _Job) -> None:
        self.pending.add(job.total)
        self.jobs.put(job)

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run(self.control)
            self.pending.discard(job.total)

    def finish(self, seconds: float) -> None:
        """Let the thread end, and wait this long for the losses that are still to come."""
        self.jobs.put(None)
        if current_thread() is not self.thread:
            self.thread.join(seconds)
            if self.thread.is_alive():
                self.control.abort()
                self.thread.join(_ABORT_SECONDS)
        for total in list(self.pending):
            with suppress(InvalidStateError):
                total.set_exception(
                    PipelineError(
                        "the pipeline was closed before the loss of this step was known; read "
                        "losses before closing it"
                    )
                )


class LossExchange:
    """Shares the losses that are on devices of several ranks.

    `connect` is called by the first step that has such a loss, on every rank, and returns a
    control that nothing else uses.
    """

    def __init__(self, connect: Callable[[], Control], guard: Guard) -> None:
        self._connect = connect
        self._guard = guard
        self._thread: _LossThread | None = None

    def share(self, known: float, mine: LossValue | None) -> SharedLoss:
        """Return the loss of a step; every rank calls this, in the same order.

        `known` is what all ranks know already, and `mine` what only this rank can fetch.
        """
        if self._thread is None:
            with self._guard.tracking():
                self._thread = _LossThread(self._connect())
            finalize(self, self._thread.finish, _CLOSE_SECONDS)
        total: Future[float] = Future()
        self._thread.add(_Job(known, mine, total))
        return SharedLoss(total, self._guard)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Fetch what is still to come, for at most this long; then losses without a value fail.

        The connections stay, because other ranks may still read what was sent last.
        """
        if self._thread is not None:
            self._thread.finish(seconds)


def share_losses(group: dist.ProcessGroup | None, guard: Guard) -> LossExchange | None:
    """Return the exchange between the ranks of a group; one process needs none."""
    return None if group is None else LossExchange(lambda: GroupControl(group), guard)
