"""Steps of several GPU ranks: torch.distributed.pipelining and Penstock in turns.

    python benchmarks/gpu_ranks.py                    four ranks
    python benchmarks/gpu_ranks.py --quick            fewer repeats, three schedules
    python benchmarks/gpu_ranks.py --only ZBV 1F1B

With fewer GPUs than ranks, all ranks share the first one; see ranks_on_one_gpu.py. NCCL is slow
then, so compare the columns of NCCL with each other, and peer memory with what the simulator
predicts.

Each schedule runs in turns: torch over NCCL, Penstock over NCCL, Penstock over peer memory. No
outputs are returned on either side. "One by one" waits for all devices after every step and takes
the slowest rank; "back to back" queues several steps and divides. Times are medians with
quartiles.

Two simulated steps are beside them. One uses costs that were measured on the first rank while the
others did nothing: on a device that ranks share, these are too low, because clocks and memory are
shared as well. The other uses the durations of the actions in recorded steps over peer memory, and
says whether the step takes longer than its actions explain.

Peak memory is that of torch's allocator, without what the other runners of the same schedule hold;
peer memory takes two or three messages a channel more.
Prints its table and writes it to benchmarks/results/gpu_ranks.md.
"""

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
import torch.nn.functional as F  # noqa: N812  # torch's own custom
from torch import nn
from torch.multiprocessing.spawn import spawn

import penstock as ps
from penstock.sim.recorded.costs_of_timeline import costs_of
from ranks_on_one_gpu import (
    Meter,
    describe_device,
    free_port,
    join,
    shared_device,
    spread_of,
    take_turns,
)
from result_files import write_result

# Our name, torch's class where there is one, and stages per rank.
SCHEDULES = (
    ("GPipe", "ScheduleGPipe", 1),
    ("1F1B", "Schedule1F1B", 1),
    ("Interleaved1F1B", "ScheduleInterleaved1F1B", 2),
    ("DualPipeV", "ScheduleDualPipeV", 2),
    ("ZB-H1", None, 1),
    ("ZB-H2", None, 1),
    ("InterleavedZeroBubble", "ScheduleInterleavedZeroBubble", 2),
    ("ZBV", "ScheduleZBVZeroBubble", 2),
)
QUICK = ("1F1B", "Interleaved1F1B", "ZBV")
V_SHAPED = ("ZBV", "DualPipeV")
COMPUTE = ("forward", "backward_input", "backward_weight", "full_backward")


class Block(nn.Module):
    """A transformer block with RMSNorm, attention and SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        inner = width * 8 // 3 // 64 * 64
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.before_attention(x)).view(
            batch, tokens, 3, self.heads, width // self.heads
        )
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        h = self.before_mlp(x)
        mixed: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return mixed


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target.float())


@dataclass
class Runner:
    """One way to run a schedule: what a step calls, its modules, and how to end it."""

    who: str
    step: Callable[[], object]
    modules: list[nn.Module]
    close: Callable[[], None]
    record: Callable[[], ps.Timeline] | None = None
    # Bytes that it keeps between steps: weights, and buffers for messages.
    held: int = 0


@dataclass(frozen=True)
class Row:
    """What was measured of one runner; seconds are medians with the quartiles around them."""

    schedule: str
    who: str
    one: tuple[float, float, float]
    many: float
    peak: float
    simulated_alone: float
    simulated_recorded: float | None
    work: float


class Rank:
    """What one rank does."""

    def __init__(self, rank: int, options: argparse.Namespace, device: torch.device) -> None:
        self.rank, self.options, self.device = rank, options, device
        self.ranks, self.began = options.ranks, perf_counter()
        self.meter = Meter(device)
        generator = torch.Generator(device).manual_seed(1)
        shape = options.microbatches, options.tokens, options.width
        self.x, self.y = (
            torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
            for _ in range(2)
        )

    def module(self, stage: int, per_rank: int) -> nn.Module:
        torch.manual_seed(100 + stage)
        blocks = self.options.layers // per_rank
        with self.device:
            made = [Block(self.options.width, self.options.width // 128) for _ in range(blocks)]
            return nn.Sequential(*made).to(torch.bfloat16)

    def stages(self, name: str, per_rank: int) -> dict[int, nn.Module]:
        mirror = 2 * self.ranks - 1 - self.rank if name in V_SHAPED else self.rank + self.ranks
        own = [self.rank] if per_rank == 1 else [self.rank, mirror]
        return {stage: self.module(stage, per_rank) for stage in own}

    def ours(self, name: str, per_rank: int, transport: Any) -> Runner:
        own = self.stages(name, per_rank)
        pipeline = ps.Pipeline(
            own,
            name,
            microbatches=self.options.microbatches,
            loss=loss_of,
            reduction="mean",
            group=dist.group.WORLD,
            device=self.device,
            options=ps.RunOptions(transport=transport, compare_data=False),
        )

        def record() -> ps.Timeline:
            timeline = pipeline.step(self.x, target=self.y, record=True).timeline
            assert timeline is not None, "recorded"
            return timeline

        return Runner(
            f"penstock, {transport}",
            lambda: pipeline.step(self.x, target=self.y),
            list(own.values()),
            pipeline.close,
            record if transport == "peer memory" else None,
        )

    def theirs(self, name: str, kind: str, per_rank: int) -> Runner:
        own = self.stages(name, per_rank)
        count = self.ranks * per_rank
        stages = [
            torch_pipelining.PipelineStage(
                module, index, count, self.device, group=dist.group.WORLD
            )
            for index, module in own.items()
        ]
        schedule = getattr(torch_pipelining, kind)(
            stages[0] if per_rank == 1 else stages, self.options.microbatches, loss_fn=loss_of
        )
        args = (self.x,) if 0 in own else ()
        named = {"target": self.y, "losses": []} if count - 1 in own else {}

        def step() -> None:
            schedule.step(*args, **named, return_outputs=False)

        return Runner("torch, nccl", step, list(own.values()), lambda: None)

    def tell(self, what: str) -> None:
        """Show progress: a schedule takes half a minute."""
        if self.rank == 0:
            print(f"{perf_counter() - self.began:4.0f} s: {what}", file=sys.stderr, flush=True)

    def clear(self, runner: Runner) -> None:
        for module in runner.modules:
            module.zero_grad(set_to_none=True)

    def time_one(self, runner: Runner) -> float:
        self.clear(runner)
        return self.meter.time(runner.step)

    def time_many(self, runner: Runner) -> float:
        def step() -> None:
            self.clear(runner)
            runner.step()

        return self.meter.time(step, self.options.many)

    def peak(self, runner: Runner, others: int) -> float:
        self.clear(runner)
        return self.meter.peak(runner.step, others)

    def costs_alone(self) -> ps.Costs:
        """Costs of a rank's share of the model, which the first rank measures alone."""
        found: list[Any] = [None]
        if self.rank == 0:
            found = [self.measure()]
        dist.broadcast_object_list(found, 0, self.meter.host)
        f, i, w, b = found[0]
        return ps.Costs(forward=f, backward_input=i, backward_weight=w, full_backward=b)

    def measure(self) -> tuple[float, float, float, float]:
        """F, I, W and B of a rank's blocks inside the model, where gradients are sent on."""
        modules = [self.module(stage, 2) for stage in range(3)]
        costs = ps.measure(
            modules, example=(self.x[:1],), target=self.y[:1], loss=loss_of, repeats=5
        )
        f, i, w, b = (2 * costs.per_stage(name, 3)[1] for name in COMPUTE)
        return f, i, w, b

    def warm_up(self, make: Callable[[], Runner]) -> Runner:
        """Build a runner, let it run, and note what it holds."""
        before = torch.cuda.memory_allocated()
        runner = make()
        for _ in range(self.options.warm):
            self.time_one(runner)
        self.clear(runner)
        runner.held = torch.cuda.memory_allocated() - before
        return runner

    def simulate_recorded(self, runner: Runner, name: str) -> float | None:
        """Return the step simulated with recorded durations, or None for torch's."""
        if runner.record is None:
            return None
        timelines = [runner.record() for _ in range(2)]
        built = ps.build(name, ranks=self.ranks, microbatches=self.options.microbatches)
        return ps.simulate(built, costs_of(*timelines)).end_time

    def compare(self, schedule: tuple[str, str | None, int], costs: ps.Costs) -> list[Row]:
        """Run one schedule in every way, in turns."""
        name, kind, per_rank = schedule
        self.tell(name)
        makers: list[Callable[[], Runner]] = []
        if kind is not None and "torch" in self.options.who:
            makers.append(partial(self.theirs, name, kind, per_rank))
        transports = [t for t in ("nccl", "peer memory") if t.split()[0] in self.options.who]
        makers += [partial(self.ours, name, per_rank, transport) for transport in transports]
        runners = [self.warm_up(make) for make in makers]
        held = sum(runner.held for runner in runners)
        ones = take_turns(runners, self.options.repeats, self.time_one)
        manys = take_turns(runners, 2, self.time_many)
        built = ps.build(name, ranks=self.ranks, microbatches=self.options.microbatches)
        timeline = ps.simulate(built, costs)
        rows = [
            Row(
                name,
                runner.who,
                spread_of(one),
                min(many),
                self.peak(runner, held - runner.held),
                timeline.end_time,
                self.simulate_recorded(runner, name),
                max(timeline.busy_seconds),
            )
            for runner, one, many in zip(runners, ones, manys, strict=True)
        ]
        dist.barrier(self.meter.host)
        for runner in runners:
            runner.close()
        del runners
        gc.collect()
        torch.cuda.empty_cache()
        return rows


def beside(measured: float, simulated: float | None) -> str:
    """Format the simulated milliseconds, and how much longer the measured step takes."""
    if simulated is None:
        return ""
    return f"{1e3 * simulated:.1f} ({measured / simulated / 1e3:.3f})"


def work(rank: int, port: int, options: argparse.Namespace) -> None:
    """Run everything on one rank; the first one prints and writes the tables."""
    device = join(rank, port, options.ranks)
    try:
        bench(Rank(rank, options, device))
    except BaseException:
        # The other ranks wait for this one.
        traceback.print_exc()
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def bench(own: Rank) -> None:
    options = own.options
    own.tell("measuring on the first rank alone")
    costs = own.costs_alone()
    one = {name: 1e3 * costs.per_stage(name, 1)[0] for name in COMPUTE}
    head = [
        f"{describe_device(options.ranks, options.share)}.",
        f"{options.layers} blocks of d={options.width} a rank, {options.tokens} tokens, "
        f"{options.microbatches} microbatches, bf16, {options.repeats} repeats.",
        "Measured on the first rank alone, ms a microbatch and rank: F {forward:.2f}, I "
        "{backward_input:.2f}, W {backward_weight:.2f}, B {full_backward:.2f}.".format(**one),
        "",
        "| schedule | who | one by one, ms (quartiles) | simulated, recorded costs (measured "
        "over it) | simulated, costs measured alone (over it) | back to back | a rank's own work, "
        "costs measured alone | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines = list(head)
    if own.rank == 0:
        print("\n".join(head), flush=True)
    for schedule in SCHEDULES:
        if options.only and schedule[0] not in options.only:
            continue
        for row in own.compare(schedule, costs):
            low, middle, high = (1e3 * seconds for seconds in row.one)
            line = (
                f"| {row.schedule} | {row.who} | {middle:.1f} ({low:.1f} to {high:.1f}) | "
                f"{beside(middle, row.simulated_recorded)} | "
                f"{beside(middle, row.simulated_alone)} | "
                f"{1e3 * row.many:.1f} | {1e3 * row.work:.1f} | {row.peak:.0f} |"
            )
            lines.append(line)
            if own.rank == 0:
                print(line, flush=True)
    if own.rank == 0 and not options.quick:
        spread = f"medians of {options.repeats} repeats in turns, with quartiles"
        device = torch.cuda.get_device_name()
        text = "\n".join(lines)
        write_result("gpu_ranks", "Several GPU ranks", [text], spread=spread, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"ranks": 4, "width": 2048, "layers": 8, "tokens": 2048, "microbatches": 8}
    counts = {"repeats": 9, "warm": 3, "many": 6, "share": 0}
    for name, value in (sizes | counts).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="*", help="schedules")
    parser.add_argument("--who", nargs="*", default=["torch", "nccl", "peer"])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, but torch sees none")
    options.share = options.share or 100 // options.ranks
    if options.quick:
        options.only, options.repeats, options.many = options.only or QUICK, 5, 4
    with shared_device(options.ranks, options.share):
        spawn(work, (free_port(), options), nprocs=options.ranks)  # type: ignore[no-untyped-call]  # untyped upstream


if __name__ == "__main__":
    main()
