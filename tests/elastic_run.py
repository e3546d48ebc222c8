"""What every process of the elastic test runs: a small job in float64, its steps in a file."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event
from time import sleep

import torch
from torch import nn

import penstock as ps
from penstock.atomic_files import write_atomically

STEPS, ROWS, WIDTH = 40, 8, 6


class Model(nn.Module):
    """Eight layers with dropout: whatever the ranks are, it draws the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)
        )
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return (x,), target


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def make_job(
    batch: Callable[[int], tuple[tuple[torch.Tensor, ...], torch.Tensor]] = batch,
) -> ps.Job:
    """Costs are given, so that nothing depends on a clock but the search."""
    return ps.Job(
        model=Model,
        layers="layers",
        loss=nn.MSELoss(),
        optimizer=adam,
        batch=batch,
        rows=ROWS,
        microbatches=4,
        steps=STEPS,
        costs=[ps.Piece.of_weight(f"layers.{number}", 1.0) for number in range(8)],
        seed=7,
    )


class Notes:
    """Notes every step; holds where the test wants the number of ranks to change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, step: ps.elastic.ElasticStep) -> None:
        if os.environ["RANK"] != "0":
            return
        with (self._folder / "steps.txt").open("a", encoding="utf-8") as log:
            log.write(f"{step.number} {step.ranks} {step.loss!r}\n")
        while self._is_held(step):
            sleep(0.05)

    def _is_held(self, step: ps.elastic.ElasticStep) -> bool:
        """Wait after the steps that the test names, each with its number of ranks."""
        held = (self._folder / "held.txt").read_text().splitlines()
        return f"{step.number} {step.ranks}" in held


def wait_to_be_lost(folder: Path, when: str) -> None:
    """Wait for ever if the test loses this rank now; let the test know which machine it is."""
    place = f"{when} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    file = folder / "lost.txt"
    if file.exists() and file.read_text() == place:
        write_atomically(folder / "machine.txt", str(os.getppid()))
        Event().wait()


def main() -> None:
    """Train in the folder that is given."""
    folder = Path(sys.argv[1])
    timeouts = ps.Timeouts(silence_seconds=60, join_seconds=60)
    wait_to_be_lost(folder, "before the meeting")

    def batch_of(step: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        # The first one is asked for when the pipeline is built.
        wait_to_be_lost(folder, "in the build")
        return batch(step)

    ps.train_elastically(
        make_job(batch_of),
        folder / "run",
        save_every=5,
        plan_seconds=1.0,
        on_step=Notes(folder),
        timeouts=timeouts,
    )


if __name__ == "__main__":
    main()
