"""A rank on a GPU is killed or stops: the others end, name it, and keep nothing of it.

It happens in the middle of a step, where hosts wait, and after a step was queued, where only the
streams of the others wait. What these then read is NaN. Without MPS, under which the end of one
client can take the others along.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.ir.actions import Kind
from tests.alive.fault_ranks import Fate, run_ranks
from tests.gpu.problems import EQUAL, make_batch, make_blocks, widths_of
from tests.gpu.test_faults import Trap
from tests.models import make_stages, mean_loss
from tests.processes import backend_of

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

VICTIM = 1
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
TRANSPORTS = ("nccl", "peer memory")
# A rank that is stopped is given up after this time.
SILENCE_SECONDS = 4.0
FREED_SECONDS = 20.0


@dataclass(frozen=True)
class Case:
    """How a rank is lost, on what transport, at which step, and with how many others."""

    signal: signal.Signals
    transport: str
    step: int = 2
    ranks: int = 2

    def __str__(self) -> str:
        return f"{self.signal.name}-{self.transport}-step{self.step}-{self.ranks}ranks"

    @property
    def resume(self) -> int | None:
        """The rank to continue once the others have ended, if it stops."""
        return VICTIM if self.signal is signal.SIGSTOP else None

    def strike(self) -> None:
        """Let this process end or stop."""
        os.kill(os.getpid(), self.signal)

    def timeouts(self, folder: Path) -> ps.Timeouts:
        """Return limits under which only a rank that stops is given up because it is silent."""
        is_stop = self.signal is signal.SIGSTOP
        return ps.Timeouts(silence_seconds=SILENCE_SECONDS if is_stop else 60.0, folder=folder)

    def options(self, device: torch.device, **others: object) -> ps.RunOptions:
        """Return the options for this transport; without a GPU there is only gloo."""
        transport = self.transport if device.type == "cuda" else "auto"
        return ps.RunOptions(transport=transport, **others)  # type: ignore[arg-type]  # as given


def check_survivors(case: Case, fates: list[Fate]) -> None:
    """Check that every other rank raised the same error, which names the lost one."""
    shown = "\n\n".join(map(str, fates))
    others = [fate for rank, fate in enumerate(fates) if rank != VICTIM]
    assert [type(fate.reported) for fate in others] == [ps.errors.PeerLostError] * len(others), (
        shown
    )
    assert {fate.reported.rank for fate in others} == {VICTIM}, shown
    assert len({str(fate.reported) for fate in others}) == 1, shown
    assert [fate.exit_code for fate in others] == [1] * len(others), shown
    if case.signal is signal.SIGKILL:
        assert fates[VICTIM].exit_code == -signal.SIGKILL
    else:
        assert str(fates[VICTIM].reported) == str(others[0].reported), shown


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def check_freed(device: torch.device, before: int) -> None:
    """Check that no process keeps memory of the device, once the driver has cleaned up."""
    limit = monotonic() + FREED_SECONDS
    while free_bytes(device) < before and monotonic() < limit:
        sleep(0.1)
    assert free_bytes(device) >= before


def check_case(job: Callable[..., str], case: Case, device: torch.device, folder: Path) -> None:
    """Run the job on all ranks of a case, and check what is left."""
    before, backend = free_bytes(device), backend_of(device)
    fates = run_ranks(
        job, case.ranks, folder, device, case, folder, resume=case.resume, backend=backend
    )
    check_survivors(case, fates)
    check_freed(device, before)


# ---- in the middle of a step


def train_into_the_loss(rank: int, device: torch.device, case: Case, folder: Path) -> str:
    trap = Trap(rank == VICTIM, case.strike)
    blocks = make_blocks(widths_of(2 * case.ranks, are_equal=True), device)
    pipeline = ps.Pipeline(
        make_stages("ZBV", case.ranks, blocks),
        "ZBV",
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD,
        device=device,
        timeouts=case.timeouts(folder),
        options=case.options(device, around={Kind.FORWARD: trap}),
    )
    for number in range(4):
        trap.is_set = number == case.step
        batch, target = make_batch((8, EQUAL), number, device)
        pipeline.step(batch, target=target)
    return "came through"


# While shapes are learned and after that; on four ranks others wait for each other too.
IN_A_STEP = [
    *(Case(*values) for values in product(SIGNALS, TRANSPORTS)),
    *(Case(signal.SIGKILL, transport, step=0) for transport in TRANSPORTS),
    *(Case(signal.SIGKILL, transport, ranks=4) for transport in TRANSPORTS),
    Case(signal.SIGSTOP, "peer memory", ranks=4),
]


@pytest.mark.parametrize("case", IN_A_STEP, ids=str)
def test_others_end_and_name_the_rank_that_was_lost_in_a_step(
    accelerator: torch.device, case: Case, tmp_path: Path
) -> None:
    check_case(train_into_the_loss, case, accelerator, tmp_path)


# ---- while a stream waits, and no host


class Doze(nn.Module):
    """Lets the device sleep when it is set, while the host goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_set = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_set:
            # About half a minute; nobody waits for all of it.
            torch.cuda._sleep(60_000_000_000)  # type: ignore[no-untyped-call]  # untyped upstream
        return x * 1.0


def outlive_a_waiting_stream(rank: int, device: torch.device, case: Case, folder: Path) -> str:
    doze, layer = Doze(), nn.Linear(EQUAL, EQUAL, device=device)
    pipeline = ps.Pipeline(
        {rank: nn.Sequential(layer, doze)},
        "1F1B",
        microbatches=2,
        loss=mean_loss,
        reduction="mean",
        group=dist.group.WORLD,
        device=device,
        timeouts=case.timeouts(folder),
        options=case.options(device, compare_data=False),
    )
    x = torch.ones(4, EQUAL, device=device)
    for _ in range(3):
        pipeline.step(x, target=x)
    torch.cuda.synchronize()
    dist.barrier()
    layer.zero_grad()
    doze.is_set = rank == VICTIM
    pipeline.step(x, target=x)
    if rank == VICTIM:
        case.strike()
    else:
        # The victim's device never sends the gradients. These are no calls of ours.
        torch.cuda.synchronize()
        assert layer.weight.grad is not None
        assert layer.weight.grad.isnan().all(), "a number that never came looks right"
        # Nor is it kept: an optimizer may have used it.
        with pytest.raises(ps.errors.PeerLostError):
            pipeline.state_dict()
    pipeline.step(x, target=x)
    return "came through"


@pytest.mark.parametrize("case", [Case(*c) for c in product(SIGNALS, TRANSPORTS)], ids=str)
def test_waits_of_streams_end_with_nan_when_a_rank_is_lost(
    accelerator: torch.device, case: Case, tmp_path: Path
) -> None:
    if accelerator.type != "cuda":
        pytest.skip("only devices have streams that wait")
    check_case(outlive_a_waiting_stream, case, accelerator, tmp_path)
