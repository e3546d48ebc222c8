"""What the other ranks do when one fails: Penstock and torch.distributed.pipelining side by side.

    python benchmarks/faults.py             every rank, microbatch and schedule: about 20 minutes
    python benchmarks/faults.py --quick     one rank and microbatch per kind: about 2 minutes

Four gloo processes train a small model. In the second step one of them, at its first, middle or
last microbatch, raises, exits, is killed or is stopped. It is measured when the last of the others
has ended, whether what each of them raised names the rank and the action, and what is still
running a minute later. In time is within 10 s; of a rank that is stopped, within 10 s after the
30 s that both wait for an answer here: Penstock's default, and set as the timeout of torch's group
so that it can be measured. By its default for gloo, 30 minutes, the same waits last that long.
Prints a table in Markdown and writes it to benchmarks/results/faults.md.
"""

import argparse
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import penstock as ps
from penstock.alive.timeouts import Timeouts
from result_files import write_result

LIBRARIES = ("torch", "penstock")
SCHEDULES = ("1F1B", "ZBV")
KINDS = ("raise in F", "raise in B", "SIGKILL", "SIGSTOP", "exit")
RANKS, MICROBATCHES, WIDTH = 4, 8, 16
PLACES = (0, MICROBATCHES // 2, MICROBATCHES - 1)
# How long a rank may give no answer: torch's timeout of the group, Penstock's silence.
ANSWER_SECONDS = 30.0
# What counts as in time, how long is waited for ranks to end, and for them to get going.
IN_TIME_SECONDS, LIMIT_SECONDS, START_SECONDS = 10.0, 60.0, 300.0
PRELOADED = ["torch", "torch.distributed.pipelining", "penstock.training.pipeline"]


@dataclass(frozen=True, slots=True)
class Case:
    """One run: who fails, where and how."""

    library: str
    schedule: str
    kind: str
    victim: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the others; `seconds` is absent where not all of them ended."""

    case: Case
    seconds: float | None
    names_rank: bool
    names_action: bool
    left: int
    said: str


@dataclass(eq=False)
class Trap:
    """Fails at one forward or backward of one stage, once it is set."""

    case: Case
    folder: Path
    is_set: bool = False
    calls: dict[str, int] = field(default_factory=lambda: {"F": 0, "B": 0})

    def step_on(self, direction: str) -> None:
        """Count a call, and fail if it is the one."""
        if not self.is_set:
            return
        number = self.calls[direction]
        self.calls[direction] += 1
        is_here = direction == ("B" if self.case.kind == "raise in B" else "F")
        if is_here and number == self.case.microbatch:
            (self.folder / "fault").write_text(repr(time.time()), encoding="utf-8")
            self.fail()

    def fail(self) -> None:
        """Do what the case asks for."""
        match self.case.kind:
            case "SIGKILL" | "SIGSTOP":
                os.kill(os.getpid(), getattr(signal, self.case.kind))
            case "exit":
                sys.exit(3)
            case _:
                raise ValueError("a mistake in the model")


class Tripwire(torch.autograd.Function):
    """Hands its input on, and calls the trap on both ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trap: Trap) -> torch.Tensor:
        ctx.trap = trap
        trap.step_on("F")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.trap.step_on("B")
        return gradients[0], None


class StageModule(nn.Module):
    """Two linear layers, with a trap between them on the rank that fails."""

    def __init__(self, trap: Trap | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.trap = trap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.trap is not None:
            x = Tripwire.apply(x, self.trap)  # type: ignore[no-untyped-call]  # upstream
        result: torch.Tensor = self.second(torch.relu(x))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--library", choices=LIBRARIES, action="append")
    parser.add_argument("--at-once", type=int, default=3, help="cases at one time")
    options = parser.parse_args()
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(PRELOADED)
    cases = list(every_case(options.library or LIBRARIES, quick=options.quick))
    results = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for number, result in enumerate(pool.map(run_case, cases), 1):
            print(f"{number} of {len(cases)}: {progress(result)}", file=sys.stderr, flush=True)
            results.append(result)
    spread = f"medians over the cases, with the worst; {options.at_once} cases at a time"
    sections = [
        f"## Outcomes\n\n{table(results)}",
        f"## What another rank raised\n\n{said_table(results)}",
    ]
    print(write_result("faults", "Faults", sections, spread=spread))


def progress(result: Result) -> str:
    case, seconds = result.case, result.seconds
    when = "others did not end" if seconds is None else f"last of the others after {seconds:.1f} s"
    where = f"rank {case.victim}, microbatch {case.microbatch}"
    return f"{case.library}, {case.schedule}, {case.kind}, {where}: {when}"


def every_case(libraries: tuple[str, ...], *, quick: bool) -> Iterator[Case]:
    victims, places = ((2,), PLACES[1:2]) if quick else (range(RANKS), PLACES)
    for names in product(libraries, SCHEDULES, KINDS, victims, places):
        yield Case(*names)


def run_case(case: Case) -> Result:
    """Run four processes, one of which fails, and see how the others end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes: list[BaseProcess] = [
            multiprocessing.Process(target=run_rank, args=(case, rank, name))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        try:
            return observe(case, folder, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def observe(case: Case, folder: Path, processes: list[BaseProcess]) -> Result:
    others = [process for rank, process in enumerate(processes) if rank != case.victim]
    deadline = time.time() + START_SECONDS
    running, ended = {process.sentinel for process in others}, 0.0
    while running and time.time() < deadline:
        if done := wait(list(running), timeout=0.2):
            ended = time.time()
            running.difference_update(done)
        if (folder / "fault").exists():
            deadline = float((folder / "fault").read_text() or time.time()) + LIMIT_SECONDS
    if not (folder / "fault").exists():
        raise RuntimeError(f"{case} did not come to its fault: {errors(folder)}")
    victim = processes[case.victim]
    if victim.is_alive() and victim.pid is not None:
        os.kill(victim.pid, signal.SIGCONT)
        victim.join(IN_TIME_SECONDS)
    messages = [text for rank, text in sorted(errors(folder).items()) if rank != case.victim]
    letters = "BI" if case.kind == "raise in B" else "F"
    action = rf"\b{case.victim}[{letters}]{case.microbatch}\b"
    return Result(
        case,
        None if running else ended - float((folder / "fault").read_text()),
        all_say(messages, rf"\brank\W*{case.victim}\b"),
        all_say(messages, action),
        len(running) + victim.is_alive(),
        messages[0].splitlines()[0] if messages else "",
    )


def errors(folder: Path) -> dict[int, str]:
    """Return what each rank raised."""
    return {int(file.stem): file.read_text(encoding="utf-8") for file in folder.glob("*.error")}


def all_say(messages: list[str], pattern: str) -> bool:
    found = [re.search(pattern, text, re.IGNORECASE) is not None for text in messages]
    return len(found) == RANKS - 1 and all(found)


def run_rank(case: Case, rank: int, name: str) -> None:
    """Run a rank as a script would: what is raised ends the process."""
    folder = Path(name)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    torch.set_num_threads(1)
    trap = Trap(case, folder)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=ANSWER_SECONDS),
        )
        step = STEPS[case.library](case, rank, trap)
        step()
        dist.barrier()
        trap.is_set = True
        step()
        dist.destroy_process_group()
    except Exception as error:
        (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise


def stage_modules(case: Case, rank: int, trap: Trap) -> dict[int, nn.Module]:
    """Return the stages of a rank; the first one of the rank that is to fail has a trap."""
    stages = [rank] if case.schedule == "1F1B" else [rank, 2 * RANKS - 1 - rank]
    return {stage: StageModule(trap if rank == case.victim == stage else None) for stage in stages}


def torch_step(case: Case, rank: int, trap: Trap) -> Callable[[], object]:
    modules = stage_modules(case, rank, trap)
    total = RANKS * len(modules)
    stages: list[Any] = [
        pipelining.PipelineStage(module, stage, total, torch.device("cpu"))
        for stage, module in modules.items()
    ]
    schedule: Any
    if case.schedule == "1F1B":
        schedule = pipelining.Schedule1F1B(stages[0], MICROBATCHES, loss_fn=nn.MSELoss())
    else:
        schedule = pipelining.ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=nn.MSELoss())
    x = torch.randn(MICROBATCHES, WIDTH)
    args = (x,) if 0 in modules else ()
    keywords = {"target": x, "losses": []} if total - 1 in modules else {}
    return lambda: schedule.step(*args, **keywords)


def penstock_step(case: Case, rank: int, trap: Trap) -> Callable[[], object]:
    modules = stage_modules(case, rank, trap)
    pipeline = ps.Pipeline(
        modules,
        case.schedule,
        microbatches=MICROBATCHES,
        loss=nn.MSELoss(),
        group=dist.group.WORLD,
        timeouts=Timeouts(silence_seconds=ANSWER_SECONDS, folder=trap.folder),
    )
    # Every rank is given the same batch.
    x = torch.randn(MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(0))
    return lambda: pipeline.step(x, target=x)


STEPS: dict[str, Callable[[Case, int, Trap], Callable[[], object]]] = {
    "torch": torch_step,
    "penstock": penstock_step,
}


def table(results: list[Result]) -> str:
    lines = [
        "| fault | schedule | library | cases | ended in time | last one after, median (worst) "
        "| rank named | action named | left running |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, schedule, library in product(KINDS, SCHEDULES, LIBRARIES):
        found = [
            result
            for result in results
            if (result.case.kind, result.case.schedule, result.case.library)
            == (kind, schedule, library)
        ]
        if found:
            lines.append(f"| {kind} | {schedule} | {library} | {' | '.join(cells(found))} |")
    return "\n".join(lines)


def said_table(results: list[Result]) -> str:
    """Return what the first of the others raised, in one case of each kind."""
    lines = ["| fault | library | what another rank raised |", "|---|---|---|"]
    for kind, library in product(KINDS, LIBRARIES):
        texts = [r.said for r in results if (r.case.kind, r.case.library) == (kind, library)]
        if texts:
            said = re.sub(r"process \d+ on [^)]+", "process … on …", texts[0].replace("|", "/"))
            lines.append(f"| {kind} | {library} | {said[:300]} |")
    return "\n".join(lines)


def cells(results: list[Result]) -> list[str]:
    seconds = [float("inf") if r.seconds is None else r.seconds for r in results]
    limit = IN_TIME_SECONDS + ANSWER_SECONDS * (results[0].case.kind == "SIGSTOP")
    in_time = sum(value <= limit for value in seconds)
    return [
        str(len(results)),
        str(in_time),
        f"{format_seconds(statistics.median(seconds))} ({format_seconds(max(seconds))})",
        str(sum(result.names_rank for result in results)),
        str(sum(result.names_action for result in results)),
        str(sum(result.left for result in results)),
    ]


def format_seconds(seconds: float) -> str:
    return f"over {LIMIT_SECONDS:.0f} s" if seconds == float("inf") else f"{seconds:.1f} s"


if __name__ == "__main__":
    main()
