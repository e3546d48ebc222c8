"""Running, side by side with torch.distributed.pipelining in one run.

    python benchmarks/runtime.py            about five minutes on two cores
    python benchmarks/runtime.py --quick    fewer repeats and schedules

First the overhead per action, on modules so small that little else is left; then whole steps of a
transformer on two gloo processes. Repeats of ours and torch's take turns, and medians count.
Prints its tables and writes them to benchmarks/results/runtime.md.
"""

import argparse
import copy
import os
import resource
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import penstock as ps
from penstock.sim.costs_of_timeline import costs_of
from penstock.tools.launcher import Report, run_on_ranks

RESULTS = Path(__file__).parent / "results" / "runtime.md"
LIMIT_SECONDS = 900
SCHEDULES = {
    "GPipe": (pipelining.ScheduleGPipe, 1, "loop"),
    "1F1B": (pipelining.Schedule1F1B, 1, "loop"),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, 2, "loop"),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, 2, "loop"),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, 2, "loop"),
    "ZBV": (pipelining.ScheduleZBVZeroBubble, 2, "v"),
    "DualPipeV": (pipelining.ScheduleDualPipeV, 2, "v"),
}


class Block(nn.Module):
    """A transformer block: attention and a feed-forward layer, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(rows, length, 3, self.heads, -1).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        wide = nn.functional.gelu(self.up(self.norms[1](x)))
        result: torch.Tensor = x + self.down(wide)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    names = ["1F1B", "ZBV"] if quick else list(SCHEDULES)
    repeats = 3 if quick else 7
    sections = [
        f"torch {torch.__version__}, {os.cpu_count()} cores",
        overhead_table(repeats),
        step_table(names, repeats),
        memory_table(names),
    ]
    text = "\n\n".join(sections) + "\n"
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text, encoding="utf-8")


def torch_schedule(name: str, modules: dict[int, nn.Module], total: int, m: int, loss: Any) -> Any:
    """The incumbent's schedule object for the stages of this rank."""
    kind, per_rank, _ = SCHEDULES[name]
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(module, index, total, device) for index, module in modules.items()
    ]
    return kind(stages[0] if per_rank == 1 else stages, m, loss_fn=loss)


def torch_step(
    schedule: Any, x: torch.Tensor, y: torch.Tensor, *, first: bool, last: bool
) -> None:
    args = (x,) if first else ()
    if last:
        schedule.step(*args, target=y, losses=[])
    else:
        schedule.step(*args)


def take_turns(repeats: int, *calls: Callable[[], object]) -> list[float]:
    """The median seconds of each call, after one round that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        # Who comes first changes from round to round.
        for number, call in sorted(enumerate(calls), reverse=turn % 2 == 1, key=lambda c: c[0]):
            times[number].append(_once(call))
    return [statistics.median(column[1:]) for column in times]


def overhead_table(repeats: int) -> str:
    """Seconds per action beyond what a plain loop over the microbatches takes, on one rank."""
    address = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    lines = [
        "## Overhead per action, one rank, Linear(8) stages",
        "",
        "| schedule | actions | Penstock us | torch us | Penstock / torch |",
        "|---|---|---|---|---|",
    ]
    m = 64
    for name, stages in (("1F1B", 1), ("Interleaved1F1B", 4)):
        ours = [nn.Linear(8, 8) for _ in range(stages)]
        theirs, plain = copy.deepcopy(ours), nn.Sequential(*copy.deepcopy(ours))
        x, y, loss = torch.randn(m, 8), torch.randn(m, 8), nn.MSELoss()
        pipe = ps.Pipeline(ours, name, microbatches=m, loss=loss, group=dist.group.WORLD)
        schedule = torch_schedule(name, dict(enumerate(theirs)), stages, m, loss)

        def loop(plain: nn.Module = plain, x: Any = x, y: Any = y, loss: Any = loss) -> None:
            for part, target in zip(x.split(1), y.split(1), strict=True):
                (loss(plain(part), target) / m).backward()

        base, mine, other = take_turns(
            repeats * 10,
            loop,
            partial(pipe.step, x, target=y),
            partial(torch_step, schedule, x, y, first=True, last=True),
        )
        actions = 2 * m * stages
        mine, other = ((seconds - base) / actions * 1e6 for seconds in (mine, other))
        lines.append(f"| {name} | {actions} | {mine:.1f} | {other:.1f} | {mine / other:.2f} |")
    dist.destroy_process_group()
    return "\n".join(lines)


def step_table(names: list[str], repeats: int) -> str:
    """Whole steps of a transformer of eight blocks on two processes."""
    rows = _on_two_ranks(_measure_steps, names, repeats)
    lines = [
        "## Steps on two gloo ranks, 8 blocks of width 256, 8 microbatches of 2 x 128 tokens",
        "",
        "| schedule | Penstock s | torch s | Penstock / torch | simulated / recorded "
        "| first step / later, Penstock | first / later, torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, mine, other, simulated, my_first, other_first in rows:
        lines.append(
            f"| {name} | {mine:.3f} | {other:.3f} | {mine / other:.3f} | {simulated:.3f} "
            f"| {my_first / mine:.2f} | {other_first / other:.2f} |"
        )
    return "\n".join(lines)


def memory_table(names: list[str]) -> str:
    """Peak memory of the larger of two processes, each measured in processes of its own."""
    lines = [
        "## Peak resident memory of the larger rank, same model",
        "",
        "| schedule | Penstock MiB | torch MiB | Penstock / torch |",
        "|---|---|---|---|",
    ]
    for name in names:
        mine, other = (_on_two_ranks(_measure_memory, name, ours) for ours in (True, False))
        lines.append(f"| {name} | {mine:.0f} | {other:.0f} | {mine / other:.3f} |")
    return "\n".join(lines)


def _problem(name: str, rank: int) -> tuple[list[nn.Module], dict[int, nn.Module], Any, Any, Any]:
    """All stages, this rank's own, a batch and a loss."""
    torch.manual_seed(0)
    _, per_rank, style = SCHEDULES[name]
    total = 2 * per_rank
    blocks = [Block(256, 4) for _ in range(8)]
    size = 8 // total
    stages: list[nn.Module] = [
        nn.Sequential(*blocks[size * i : size * (i + 1)]) for i in range(total)
    ]
    placement = ps.Placement.v(2) if style == "v" else ps.Placement.loop(2, per_rank)
    own = {stage: stages[stage] for stage in placement.stages(rank)}
    return stages, own, torch.randn(16, 128, 256), torch.randn(16, 128, 256), nn.MSELoss()


def _measure_steps(rank: int, names: list[str], repeats: int) -> list[tuple[Any, ...]]:
    rows = []
    for name in names:
        stages, own, x, y, loss = _problem(name, rank)
        theirs = copy.deepcopy(own)
        is_last = len(stages) - 1 in own
        pipe = ps.Pipeline(stages, name, microbatches=8, loss=loss, group=dist.group.WORLD)
        schedule = torch_schedule(name, theirs, len(stages), 8, loss)
        mine_call = partial(pipe.step, x, target=y)
        other_call = partial(torch_step, schedule, x, y, first=0 in own, last=is_last)
        firsts = [_once(mine_call), _once(other_call)]
        mine, other = take_turns(repeats, mine_call, other_call)
        ratios = []
        for _ in range(3):
            timeline = pipe.step(x, target=y, record=True).timeline
            assert timeline is not None, "recorded"
            simulated = ps.simulate(timeline.schedule, costs_of(timeline))
            ratios.append(simulated.end_time / timeline.end_time)
        rows.append((name, mine, other, statistics.median(ratios), *firsts))
    return rows


def _measure_memory(rank: int, name: str, ours: bool) -> float:
    stages, own, x, y, loss = _problem(name, rank)
    call: Callable[[], object]
    if ours:
        pipe = ps.Pipeline(own, name, microbatches=8, loss=loss, group=dist.group.WORLD)
        call = partial(pipe.step, x, target=y)
    else:
        schedule = torch_schedule(name, own, len(stages), 8, loss)
        call = partial(torch_step, schedule, x, y, first=0 in own, last=len(stages) - 1 in own)
    for _ in range(3):
        call()
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak)


def _once(call: Callable[[], object]) -> float:
    dist.barrier()
    begin = perf_counter()
    call()
    return perf_counter() - begin


def _on_two_ranks(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on two gloo processes and give back what rank 0 returns."""
    return run_on_ranks(partial(_child, function, args), 2, seconds=LIMIT_SECONDS)[0]


def _child(function: Callable[..., Any], args: Any, _report: Report) -> Any:
    torch.set_num_threads(1)
    return function(dist.get_rank(), *args)


if __name__ == "__main__":
    main()
