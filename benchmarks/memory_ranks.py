"""A Llama that does not fit with 1F1B, on GPU ranks: planned, and with every stage recomputed.

    python benchmarks/memory_ranks.py              about 1.1 billion parameters, four ranks
    python benchmarks/memory_ranks.py --quick      fewer steps
    python benchmarks/memory_ranks.py --rehearse   a tiny model on CPU over gloo, without limits

With fewer GPUs than ranks, all ranks share the first one; see ranks_on_one_gpu.py.

1. Costs are measured on all ranks at once, because ranks that share a device slow each other down:
   seconds, bytes, and the link to the host.
2. The limit of every rank is what 1F1B needs on its first rank, less half of the activations.
   Torch's allocator enforces it on every rank, with 15 % on top for memory that lies in pieces and
   for what libraries take.
3. One after the other, in several rounds, the same model trains under the limit: with 1F1B whose
   stages are all recomputed, by Penstock and by torch with a checkpoint around each stage; and
   with schedules that `plan_memory` made with each means and with both. 1F1B comes last, because a
   rank without memory ends the job.

Seconds are those of forwards and backwards from idle devices to idle devices on the slowest rank,
without clipping and the optimizer, which follow every step; medians with quartiles over all
rounds. The predicted step is that of the measured costs, and so is the predicted peak. Peaks are
those of torch's allocator on the fullest rank, without the first steps.

Prints its table and writes it to benchmarks/results/memory_ranks.md.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from llama_model import MOST_NORM, Shape, as_tensor_stages, loss_of
from llama_work import Settings, measure_costs
from penstock.passes import add_recompute
from rank_jobs import JobError, Say, run_job
from ranks_on_one_gpu import Meter, shared_device, spread_of
from result_files import write_result

FULL = Shape(2048, 8192, 16, 32, 32000, 2048, 8)
TINY = Shape(32, 48, 8, 4, 64, 16, 8)
# What memory that lies in pieces may take beyond the limit.
SLACK = 1.15
# Seconds without any progress after which a job counts as hanging.
SILENCE = 120.0
SECONDS_TO_PLAN = 8.0
MEANS = {"recomputing": "recompute", "offloading": "offload", "both": "both"}


@dataclass(frozen=True)
class Way:
    """One way to train: the order, who runs it, and what is predicted."""

    name: str
    schedule: ps.Schedule
    is_ours: bool
    seconds: float
    peaks: tuple[float, ...]

    @property
    def peak_bytes(self) -> float:
        return max(self.peaks)


@dataclass(frozen=True)
class Limits:
    """The bytes of each rank, and how often to run."""

    memory: float
    rounds: int
    warm: int
    steps: int


class Checkpointed(nn.Module):
    """A stage that saves only its input."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, value: torch.Tensor) -> Any:
        return checkpoint(self.stage, value, use_reentrant=False)


@dataclass
class Trainer:
    """What a step calls, the rest of a training step, and how to end."""

    step: Callable[[], object]
    finish: Callable[[], object]
    close: Callable[[], None]


def ways_of(costs: ps.Costs, settings: Settings, memory: float) -> list[Way]:
    """Return everything that is to run, with its prediction."""
    ranks, microbatches = settings.ranks, settings.shape.microbatches
    plain = ps.build("1F1B", ranks=ranks, microbatches=microbatches)
    recomputed = add_recompute(plain)
    orders = [("1F1B", plain, True), ("1F1B, every stage recomputed", recomputed, True)]
    orders.append(("1F1B, a checkpoint around every stage", plain, False))
    ways = []
    for name, schedule, is_ours in orders:
        timeline = ps.simulate(schedule if is_ours else recomputed, costs)
        ways.append(Way(name, schedule, is_ours, timeline.end_time, timeline.rank_peak_bytes))
    for title, means in MEANS.items():
        if means != "recompute" and costs.host_link is None:
            continue
        plan = ps.planner.plan_memory(
            costs,
            ranks=ranks,
            microbatches=microbatches,
            memory=memory,
            placement="loop",
            means=means,  # type: ignore[arg-type]  # one of a table's words
            seconds=SECONDS_TO_PLAN,
        )
        peaks = plan.timeline.rank_peak_bytes
        ways.append(Way(f"planned, {title}", plan.schedule, True, plan.seconds, peaks))
    return ways


def make_ours(way: Way, settings: Settings, sizes: Sequence[int], device: torch.device) -> Trainer:
    shape = settings.shape
    pipeline = ps.Pipeline(
        shape.split(device, sizes),
        way.schedule,
        loss=loss_of,
        reduction="mean",
        group=dist.group.WORLD,
        device=device,
        options=ps.RunOptions(compare_data=False),
    )
    tokens, target = shape.batch(device)
    optimizer = torch.optim.AdamW(list(pipeline.parameters()), lr=1e-5, fused=True)

    def finish() -> None:
        pipeline.clip_grad_norm_(MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(lambda: pipeline.step(tokens, target=target), finish, pipeline.close)


def make_theirs(settings: Settings, sizes: Sequence[int], device: torch.device) -> Trainer:
    shape = settings.shape
    tokens, target = shape.batch(device)
    whole = as_tensor_stages(shape.split(device, sizes), tokens[:1])
    rank, last = dist.get_rank(), len(whole) - 1
    stage = Checkpointed(whole[rank])
    del whole
    piece = torch_pipelining.PipelineStage(stage, rank, last + 1, device, group=dist.group.WORLD)
    schedule = torch_pipelining.Schedule1F1B(piece, shape.microbatches, loss_fn=loss_of)
    args = (tokens,) if rank == 0 else ()
    named: dict[str, Any] = {"target": target, "losses": []} if rank == last else {}
    optimizer = torch.optim.AdamW(list(stage.parameters()), lr=1e-5, fused=True)

    def finish() -> None:
        norm = nn.utils.get_total_norm([p.grad for p in stage.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(stage.parameters(), MOST_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(
        lambda: schedule.step(*args, **named, return_outputs=False), finish, lambda: None
    )


def train(
    way: Way,
    limits: Limits,
    settings: Settings,
    sizes: Sequence[int],
    device: torch.device,
    meter: Meter,
) -> tuple[list[float], list[float]]:
    """Return the seconds of steps under the limit, and the most bytes of every rank."""
    own = make_ours(way, settings, sizes, device) if way.is_ours else None
    trainer = own or make_theirs(settings, sizes, device)
    # The stages of other ranks, which the model had before it was cut.
    _free()
    seconds = []
    try:
        for number in range(limits.warm + limits.steps):
            if number == limits.warm and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds.append(meter.time(trainer.step))
            trainer.finish()
    finally:
        trainer.close()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return seconds[limits.warm :], meter.of_every_rank(peak)


def run_ways(
    ways: Sequence[Way],
    limits: Limits,
    settings: Settings,
    sizes: Sequence[int],
    rank: int,
    device: torch.device,
    say: Say,
) -> None:
    """Train every way in every round; the first rank says what came out."""
    meter = Meter(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, SLACK * limits.memory / total))
    turns = list(range(1, len(ways))) * limits.rounds
    for number in [*turns, 0]:
        found = train(ways[number], limits, settings, sizes, device, meter)
        if rank == 0:
            say("row", (number, *found))
        _free()
        meter.meet()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def row_of(way: Way, seconds: list[float], peak: float) -> str:
    low, middle, high = (1e3 * one for one in spread_of(seconds))
    predicted = 1e3 * way.seconds
    return (
        f"| {way.name} | {middle:.1f} ({low:.1f} to {high:.1f}) | {predicted:.1f} "
        f"({middle / predicted:.3f}) | {peak / 2**20:.0f} | {way.peak_bytes / 2**20:.0f} "
        f"({peak / way.peak_bytes:.3f}) |"
    )


def failed_row(way: Way, error: JobError) -> str:
    text = str(error)
    told = "out of memory" if "out of memory" in text.lower() else text.splitlines()[0][:200]
    return (
        f"| {way.name} | {told.replace('|', '/')} | {1e3 * way.seconds:.1f} | "
        f"| {way.peak_bytes / 2**20:.0f} |"
    )


def bench(settings: Settings, limits: Limits) -> tuple[str, list[str]]:
    """Return where it ran, and the lines of the result."""
    where, costs, sizes = "CPU", None, ()
    job = partial(measure_costs, settings, ("loop",))
    for kind, value in run_job(job, settings.ranks, on_cpu=settings.on_cpu, silence=SILENCE):
        if kind == "costs":
            sizes, costs = value["loop"]
        elif kind == "device":
            where = value[0]
    assert costs is not None, "the ranks said what they measured"
    plain = ps.build("1F1B", ranks=settings.ranks, microbatches=settings.shape.microbatches)
    fullest = ps.simulate(plain, costs)
    still = ps.simulate(plain, replace(costs, activation_bytes=0.0, weight_stash_bytes=0.0))
    limits = replace(limits, memory=(fullest.peak_bytes + still.peak_bytes) / 2)
    ways = ways_of(costs, settings, limits.memory)
    link = "none" if costs.host_link is None else f"{costs.host_link / 1e9:.1f} GB a second"
    lines = [
        f"{settings.shape}; stages of {' '.join(map(str, sizes))} layers on {settings.ranks} "
        f"ranks. Limit of each rank: {limits.memory / 2**20:.0f} MiB, where 1F1B needs "
        f"{fullest.peak_bytes / 2**20:.0f}. Link of each rank to the host: {link}, each way.",
        "",
        "| schedule | step, ms (quartiles) | predicted (measured over it) | peak MiB | predicted "
        "(measured over it) |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    found: dict[int, tuple[list[float], float]] = {}
    failure = None
    run = partial(run_ways, ways, limits, settings, sizes)
    try:
        for _, (number, seconds, peaks) in run_job(
            run, settings.ranks, on_cpu=settings.on_cpu, silence=SILENCE
        ):
            of_ranks = " ".join(
                f"{peak / 2**20:.0f} of {predicted / 2**20:.0f}"
                for peak, predicted in zip(peaks, ways[number].peaks, strict=True)
            )
            print(f"{ways[number].name}: {seconds}, MiB {of_ranks}", file=sys.stderr, flush=True)
            before = found.get(number, ([], 0.0))
            found[number] = before[0] + seconds, max(before[1], *peaks)
    except JobError as error:
        print(error, file=sys.stderr)
        failure = error
    for number, way in enumerate(ways):
        if number in found:
            lines.append(row_of(way, *found[number]))
        else:
            assert failure is not None, "every way has run"
            lines.append(failed_row(way, failure))
        print(lines[-1], flush=True)
    return where, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on CPU")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, but torch sees none; try --rehearse")
    limits = Limits(0.0, 1, 2, 4) if options.quick else Limits(0.0, 2, 2, 5)
    shape = TINY if options.rehearse else FULL
    share = 100 // options.ranks
    settings = Settings(shape, options.ranks, options.rehearse, 0, 0, 0, share)
    if options.rehearse:
        bench(settings, limits)
        return
    with shared_device(options.ranks, share):
        where, lines = bench(settings, limits)
    spread = f"medians of {limits.rounds * limits.steps} steps in {limits.rounds} rounds"
    title = "Under a limit of memory, on GPU ranks"
    write_result("memory_ranks", title, ["\n".join(lines)], spread=spread, device=where)


if __name__ == "__main__":
    main()
