"""One process's part of a start of an elastic case: real elastic training, step by step."""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import torch
import torch.distributed as dist
from torch import nn

from penstock.alive.timeouts import Timeouts
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.elastic import ElasticStep, Job, train_elastically
from penstock.planner.partition.pieces import Piece
from penstock.tools.soak.restarts import ElasticCase, ElasticFault, ElasticFaultKind, Place
from penstock.tools.soak.steps import SILENCE_SECONDS, SoakFindings
from penstock.tools.verify.reference import GradientError

__all__ = ["run_start"]

_ROWS_PER_MICROBATCH, _WIDTH = 2, 6
_PLAN_SECONDS = 0.1
# A rank that ends before it has met the others is missed after this time.
_JOIN_SECONDS = 12.0


class _Model(nn.Module):
    """Layers of one width, in float64, with the same numbers in every process."""

    def __init__(self, case: ElasticCase) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.seed)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(case.layers)
            )
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        for layer in self.layers:
            x = layer(x)
        return x


def run_start(
    case: ElasticCase, number: int, group: dist.ProcessGroup | None, folder: Path
) -> SoakFindings:
    """Train as a rank of one start of a case, which ends with its last step or with its fault.

    It must continue after the newest complete checkpoint, with the losses of a training in which
    nothing happens.
    """
    start, run = case.starts[number], folder / f"elastic-{case.number}"
    fault = _Fault(start.fault, 0 if group is None else dist.get_rank(group))
    expected = _losses_undisturbed(case)
    first = max(Checkpoints(run / "checkpoints").steps(), default=0)
    done: list[ElasticStep] = []

    def make_model() -> _Model:
        fault.happen("start", 0)
        return _Model(case)

    def batch(step: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        # The first batch is asked for while all ranks build, too.
        fault.happen("step" if fault.is_built else "build", step)
        fault.is_built = True
        return _batch(case, step)

    train_elastically(
        Job(
            model=make_model,
            layers="layers",
            loss=nn.MSELoss(),
            optimizer=_optimizer,
            batch=batch,
            rows=case.microbatches * _ROWS_PER_MICROBATCH,
            microbatches=case.microbatches,
            steps=case.steps,
            costs=[Piece.of_weight(f"layers.{layer}", 1.0) for layer in range(case.layers)],
        ),
        run,
        save_every=case.save_every,
        plan_seconds=_PLAN_SECONDS,
        on_step=done.append,
        timeouts=Timeouts(SILENCE_SECONDS, join_seconds=_JOIN_SECONDS, folder=folder),
    )
    numbers = [step.number for step in done]
    if numbers != list(range(first + 1, case.steps + 1)):
        raise RuntimeError(f"it must continue after step {first} (it has done {numbers})")
    errors = [
        GradientError(abs(step.loss - loss) / max(1.0, abs(loss)), f"the loss of step {number}")
        for step, loss, number in zip(done, expected[first:], numbers, strict=True)
    ]
    return SoakFindings(len(done), max(errors, default=GradientError(0.0, "")))


def _losses_undisturbed(case: ElasticCase) -> list[float]:
    """Train the whole model in this process with plain torch."""
    model = _Model(case)
    optimizer = _optimizer(model.parameters())
    losses = []
    for step in range(case.steps):
        (x,), target = _batch(case, step)
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # A smaller eps would make much of gradients that are nothing but rounding.
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)


def _batch(case: ElasticCase, step: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed + step)
    rows = case.microbatches * _ROWS_PER_MICROBATCH
    x, target = torch.randn(2, rows, _WIDTH, generator=generator, dtype=torch.float64)
    return (x,), target


@dataclass(slots=True)
class _Fault:
    """A fault that happens on its rank, at its place."""

    fault: ElasticFault | None
    rank: int
    is_built: bool = False

    def happen(self, place: Place, step: int) -> None:
        """Let this rank fail if this is where it should."""
        fault = self.fault
        if fault is None or (fault.rank, fault.place) != (self.rank, place):
            return
        # Steps that were done in an earlier start are not done again.
        if place != "step" or step >= fault.step:
            _fail_as(fault.kind)


def _fail_as(kind: ElasticFaultKind) -> None:
    match kind:
        case "exit":
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), SIGKILL)
        case "stop":
            os.kill(os.getpid(), SIGSTOP)
