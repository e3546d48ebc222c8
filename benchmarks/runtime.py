"""Running, side by side with torch.distributed.pipelining in one run.

    python benchmarks/runtime.py            about five minutes on two cores
    python benchmarks/runtime.py --quick    fewer repeats and schedules

First the overhead per action, on modules so small that little else is left; then whole steps of a
transformer on two gloo processes. Repeats of ours and torch's take turns. Prints its tables and
writes them to benchmarks/results/runtime.md.

The overhead per action is (a step - a floor) / actions, where an action is a forward or a backward
of one stage. The time is what the calling thread spends on the CPU, so that other programs on the
machine count less; a step runs in that thread alone. There are two floors, both plain loops over
the microbatches with the same modules, loss and batch:

    cut      the stages are cut off from each other as in a pipeline: a stage gets a detached leaf,
             and each has its own `torch.autograd.backward`
    whole    one graph and one `.backward()` per microbatch
"""

import argparse
import copy
import resource
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from operator import truediv
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import penstock as ps
from penstock.alive.guard import NoGuard
from penstock.alive.progress_log import ProgressLog
from penstock.alive.waker import Waker
from penstock.files.flight.record_file import FlightWriter, flight_path
from penstock.loss.reduction import Reduction
from penstock.sim.recorded.costs_of_timeline import costs_of
from penstock.tools.launcher import Report, run_on_ranks
from result_files import write_result

LIMIT_SECONDS = 900
_REDUCTIONS: tuple[Reduction, ...] = ("mean", "auto")
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
        overhead_table(repeats),
        step_table(names, repeats),
        memory_table(names),
    ]
    spread = f"medians of {repeats} repeats in turns, with quartiles or the least in brackets"
    print(write_result("runtime", "Running", sections, spread=spread))


def torch_schedule(name: str, modules: dict[int, nn.Module], total: int, m: int, loss: Any) -> Any:
    """Return torch's schedule object for the stages of this rank."""
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


def take_turns(
    repeats: int, *calls: Callable[[], object], clock: Callable[[], float] = perf_counter
) -> list[list[float]]:
    """Return the seconds of each call, repeat by repeat, after one round that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        # Who comes first changes from round to round.
        for number, call in sorted(enumerate(calls), reverse=turn % 2 == 1, key=lambda c: c[0]):
            times[number].append(_once(call, clock))
    return [column[1:] for column in times]


def overhead_table(repeats: int) -> str:
    """Return the table of overhead per action on one rank, over both floors; see above."""
    address = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    lines = [
        "## Overhead per action, one rank, Linear(8) stages",
        "",
        "Microseconds of CPU time, median (least), with the flight log on.",
        "",
        "| schedule | actions | floor per action | "
        "Penstock, reduction mean | Penstock, auto | torch |",
        "|---|---|---|---|---|---|",
    ]
    for name, stages in (("1F1B", 1), ("Interleaved1F1B", 4)):
        lines += _measure_overhead(name, stages, 64, repeats * 50)
    dist.destroy_process_group()
    return "\n".join(lines)


def _measure_overhead(name: str, num_stages: int, m: int, repeats: int) -> list[str]:
    stages = [nn.Linear(8, 8) for _ in range(num_stages)]
    x, y, loss = torch.randn(m, 8), torch.randn(m, 8), nn.MSELoss()
    pipes = [
        ps.Pipeline(
            copy.deepcopy(stages),
            name,
            microbatches=m,
            loss=loss,
            reduction=reduction,
            group=dist.group.WORLD,
        )
        for reduction in _REDUCTIONS
    ]
    for pipe in pipes:
        _turn_flight_log_on(pipe)
    schedule = torch_schedule(name, dict(enumerate(copy.deepcopy(stages))), num_stages, m, loss)
    whole = nn.Sequential(*copy.deepcopy(stages)) if num_stages > 1 else stages[0]
    cut_times, whole_times, *steps = take_turns(
        repeats,
        partial(_run_cut, copy.deepcopy(stages), x, y, loss),
        partial(_run_cut, [whole], x, y, loss),
        *(partial(pipe.step, x, target=y) for pipe in pipes),
        partial(torch_step, schedule, x, y, first=True, last=True),
        clock=thread_time,
    )
    for pipe in pipes:
        pipe.close()
    actions = 2 * m * num_stages
    lines = []
    for floor_name, floor in (("cut", cut_times), ("whole", whole_times)):
        cells = [_describe_overhead(column, floor, actions) for column in steps]
        per_action = statistics.median(floor) / actions * 1e6
        lines.append(
            f"| {name} | {actions} | {floor_name}, {per_action:.1f} | {' | '.join(cells)} |"
        )
    return lines


def _turn_flight_log_on(pipe: ps.Pipeline) -> None:
    """Let a pipeline with one rank, which has no heartbeat, note its actions as any other does."""
    path = flight_path(tempfile.mkdtemp(), 0)
    writer = FlightWriter(path, rank=0, placement=pipe.schedule.placement)
    runner = pipe._runner
    assert runner is not None, "the pipeline is open"
    assert isinstance(runner.guard, NoGuard), "it has one rank"
    log = ProgressLog(Waker())
    log.attach(writer)
    runner.guard.log = log


def _run_cut(stages: Sequence[nn.Module], x: torch.Tensor, y: torch.Tensor, loss: Any) -> None:
    """Run the floor: forward and backward of each microbatch, cut between any two stages."""
    rows = torch.split(x, 1)
    for part, target in zip(rows, torch.split(y, 1), strict=True):
        given, made = [part], [stages[0](part)]
        for stage in stages[1:]:
            given.append(made[-1].detach().requires_grad_())
            made.append(stage(given[-1]))
        (loss(made[-1], target) / len(rows)).backward()
        for number in range(len(stages) - 1, 0, -1):
            torch.autograd.backward(made[number - 1], given[number].grad)


def _describe_overhead(step: Sequence[float], floor: Sequence[float], actions: int) -> str:
    median, least = (
        (find(step) - find(floor)) / actions * 1e6 for find in (statistics.median, min)
    )
    return f"{median:.1f} ({least:.1f})"


def step_table(names: list[str], repeats: int) -> str:
    """Whole steps of a transformer of eight blocks on two processes."""
    rows = _on_two_ranks(_measure_steps, names, repeats)
    lines = [
        "## Steps on two gloo ranks, 8 blocks of width 256, 8 microbatches of 2 x 128 tokens",
        "",
        "Medians; the ratio is that of the two steps of one repeat, with quartiles.",
        "",
        "| schedule | Penstock s | torch s | Penstock / torch | simulated / recorded "
        "| first step / later, Penstock | first / later, torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, mine, other, simulated, my_first, other_first in rows:
        low, middle, high = statistics.quantiles(map(truediv, mine, other), n=4)
        my_step, other_step = statistics.median(mine), statistics.median(other)
        lines.append(
            f"| {name} | {my_step:.3f} | {other_step:.3f} | {middle:.3f} ({low:.3f} to {high:.3f})"
            f" | {simulated:.3f} | {my_first / my_step:.2f} | {other_first / other_step:.2f} |"
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
    """Return all stages, this rank's own, a batch and a loss."""
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
        # A step takes as long as on the rank that is last to leave it.
        times = torch.tensor(take_turns(repeats, mine_call, other_call))
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        mine, other = times.tolist()
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


def _once(call: Callable[[], object], clock: Callable[[], float] = perf_counter) -> float:
    dist.barrier()
    begin = clock()
    call()
    return clock() - begin


def _on_two_ranks(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on two gloo processes and give back what rank 0 returns."""
    return run_on_ranks(partial(_child, function, args), 2, seconds=LIMIT_SECONDS)[0]


def _child(function: Callable[..., Any], args: Any, _report: Report) -> Any:
    torch.set_num_threads(1)
    return function(dist.get_rank(), *args)


if __name__ == "__main__":
    main()
