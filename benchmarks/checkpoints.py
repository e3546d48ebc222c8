"""Saving and loading beside torch.distributed.checkpoint, in one process and in turns.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --device cuda    into checkpoints_cuda.md

Two models with AdamW: many small tensors, and a gigabyte or less in large ones. Each round saves
with Penstock, `dcp.save` and `dcp.async_save`, and loads with Penstock and with `dcp.load`;
what comes first changes from round to round. Before each save, a file of its size is written and
removed, so that none has to wait for memory that the system has not used yet. Torch gets its own
state dicts (`get_state_dict`). "Restart" loads into a new model and a new optimizer, which has no
state yet, as a process does that has just started; "again" loads over the state that is there.
"First" is the first save of a process, which has no memory for it yet.
Columns are wall and processor time until the files are complete, and how long the caller waits
("blocked"). Figures are medians with their range; the first round warms up and is not counted.
Prints its table and writes it to benchmarks/results/checkpoints.md.
"""

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import penstock as ps
from result_files import write_result


@dataclass(frozen=True)
class Times:
    """Seconds of one run: until it is done, of the processor, and until the caller continues."""

    wall: float
    processor: float
    blocked: float


class Subject:
    """A model, its pipeline and its optimizer, with state."""

    def __init__(self, widths: tuple[int, int], layers: int, device: str) -> None:
        self.widths, self.layers, self.device = widths, layers, device
        made = [nn.Linear(*widths, bias=False, device=device) for _ in range(layers)]
        self.model = nn.Sequential(*made)
        stages = [self.model]
        self.pipeline = ps.Pipeline(stages, "GPipe", microbatches=1, loss=nn.MSELoss(), ranks=1)
        self.optimizer = torch.optim.AdamW(self.pipeline.parameters())

    def train(self) -> "Subject":
        """Give the optimizer its state."""
        for parameter in self.pipeline.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def new(self) -> "Subject":
        """Return the same without state, as after a restart."""
        return Subject(self.widths, self.layers, self.device)

    @property
    def num_bytes(self) -> int:
        return 3 * sum(parameter.nbytes for parameter in self.pipeline.parameters())

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped upstream
        torch.cuda.synchronize()


def timed(start: Callable[[], Callable[[], object]]) -> Times:
    """Time something that returns how to wait for its end."""
    _wait_for_device()
    begin, busy = time.perf_counter(), time.process_time()
    wait = start()
    blocked = time.perf_counter() - begin
    wait()
    _wait_for_device()
    return Times(time.perf_counter() - begin, time.process_time() - busy, blocked)


class Savers:
    """The ways to save, each with a folder of its own; the last checkpoint stays for loading."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder = subject, folder
        self.checkpoints = ps.Checkpoints(folder / "penstock", keep=1)
        self.step = 0

    def penstock(self) -> Callable[[], object]:
        self.checkpoints.save(self.step, self.subject.pipeline, self.subject.optimizer)
        return self.checkpoints.finish

    def dcp_save(self) -> Callable[[], object]:
        save(self.subject.state(), checkpoint_id=self.folder / f"dcp-{self.step}")
        return lambda: None

    def dcp_async(self) -> Callable[[], object]:
        future = async_save(self.subject.state(), checkpoint_id=self.folder / f"async-{self.step}")
        assert isinstance(future, Future)
        return future.result

    def first(self) -> Callable[[], object]:
        """Save as a process does that has just started."""
        checkpoints = ps.Checkpoints(self.folder / f"first-{self.step}")
        checkpoints.save(1, self.subject.pipeline, self.subject.optimizer)
        return lambda: checkpoints.__exit__(None, None, None)

    def load_penstock(self, subject: Subject) -> Callable[[], object]:
        self.checkpoints.load(subject.pipeline, subject.optimizer)
        return lambda: None

    def load_dcp(self, subject: Subject) -> Callable[[], object]:
        state = subject.state()
        load_by_torch(state, checkpoint_id=self.folder / f"dcp-{self.step}")
        set_state_dict(
            subject.model,
            subject.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        return lambda: None

    def warm(self) -> None:
        """Let the system have memory for a file at hand, which costs more than the write."""
        file = self.folder / "warm"
        piece = bytes(2**20)
        with file.open("wb") as stream:
            for _ in range(self.subject.num_bytes // len(piece) + 1):
                stream.write(piece)
        file.unlink()

    def clean(self) -> None:
        for name in ("dcp", "async", "first"):
            shutil.rmtree(self.folder / f"{name}-{self.step}")


def measure(subject: Subject, rounds: int) -> dict[str, list[Times]]:
    """Return the times of every way, by its name."""
    found: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory() as folder:
        savers = Savers(subject, Path(folder))
        for number in range(rounds + 1):
            savers.step = number + 1
            saves = [
                ("save, Penstock", savers.penstock),
                ("save, Penstock, first", savers.first),
                ("save, dcp.save", savers.dcp_save),
                ("save, dcp.async_save", savers.dcp_async),
            ]
            old, new, other = subject, subject.new(), subject.new()
            again = [
                ("load again, Penstock", partial(savers.load_penstock, old)),
                ("load again, dcp.load", partial(savers.load_dcp, old)),
            ]
            restart = [
                ("load at a restart, Penstock", partial(savers.load_penstock, new)),
                ("load at a restart, dcp.load", partial(savers.load_dcp, other)),
            ]
            for ways in (saves, again, restart):
                first = number % len(ways)
                for name, way in ways[first:] + ways[:first]:
                    if ways is saves:
                        savers.warm()
                    times = timed(way)
                    if number:
                        found.setdefault(name, []).append(times)
            savers.clean()
        with savers.checkpoints:
            pass
    return dict(sorted(found.items()))


def row(name: str, times: list[Times], base: list[Times]) -> str:
    cells = [name]
    for field in ("wall", "processor", "blocked"):
        values = [getattr(each, field) for each in times]
        cells.append(f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    own, other = (statistics.median(each.processor for each in group) for group in (times, base))
    return "| " + " | ".join([*cells, f"{own / other:.2f}"]) + " |"


def table(title: str, what: str, found: dict[str, list[Times]]) -> str:
    lines = [
        f"## {title}",
        "",
        f"{what}.",
        "",
        "| what | seconds until done | of the processor | blocked | processor, of torch's |",
        "|---|---|---|---|---|",
    ]
    for name, times in found.items():
        what = name.split(", ")[0]
        base = found[f"{what}, dcp.save" if what == "save" else f"{what}, dcp.load"]
        lines.append(row(name, times, base))
    return "\n".join(lines)


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="runs of each way that count")
    parser.add_argument("--small", type=int, default=1000, help="number of small tensors")
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the large state")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    rounds = options.rounds
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # missing in torch's stubs
    small = Subject((16, 16), options.small, options.device).train()
    # Parameters of 2048 x 2048 with two averages: 48 MiB each.
    large = Subject((2048, 2048), max(1, round(options.mebibytes / 48)), options.device).train()
    sections = [
        table(title, f"{what}: {subject.num_bytes / 2**20:.0f} MiB", measure(subject, rounds))
        for title, what, subject in (
            ("Many small tensors", f"{options.small} parameters of 1 KiB with AdamW", small),
            ("Large tensors", "Parameters of 16 MiB with AdamW", large),
        )
    ]
    spread = f"medians of {rounds} runs in turns, with the least and the most"
    on_gpu = options.device == "cuda"
    name, title = (
        ("checkpoints_cuda", "Checkpoints from a GPU")
        if on_gpu
        else ("checkpoints", "Checkpoints")
    )
    device = torch.cuda.get_device_name() if on_gpu else ""
    print(write_result(name, title, sections, spread=spread, device=device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
