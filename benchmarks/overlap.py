"""Experts whose exchange of rows is hidden behind the other half of a pair, on GPU ranks.

    python benchmarks/overlap.py               two pipeline ranks times two expert ranks
    python benchmarks/overlap.py --quick       fewer repeats
    python benchmarks/overlap.py --rehearse    a tiny model on CPU over gloo

With fewer GPUs than ranks, all ranks share the first one; see ranks_on_one_gpu.py.

Every block has a dense part and experts, one on each rank of an expert group. Rows go to the
experts and back by `all_to_all_single`, half of them to the other rank, as a model would write it:
nothing is marked. All rows of the table train the same blocks in turns, without outputs:

- torch, and Penstock with and without looking for turning points;
- the same again with an exchange that copies on its own rank, which shows what the schedule takes
  when communication costs nothing. What a step takes beyond that is the exposed communication.

The share of communication is that of a forward of one stage alone. The simulated step has the
costs of recorded steps, with what their pairs gained. A model without experts shows what looking
for turning points costs where there are none. Seconds are from idle devices to idle devices on the
slowest rank, medians with quartiles.

Prints its tables and writes them to benchmarks/results/overlap.md.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import penstock as ps
from penstock.sim.recorded.costs_of_timeline import costs_of
from rank_jobs import JobError, Say, run_job
from ranks_on_one_gpu import Meter, describe_device, shared_device, spread_of, take_turns
from result_files import write_result

RANKS, PIPELINE = 4, 2
V_SHAPED = ("DualPipeV", "ZBV")
# Our name, torch's class.
SCHEDULES = (
    ("DualPipeV", "ScheduleDualPipeV"),
    ("Interleaved1F1B", "ScheduleInterleaved1F1B"),
    ("ZBV", "ScheduleZBVZeroBubble"),
)
# The quartiles around the median, and the simulated step.
Rows: TypeAlias = dict["Way", tuple[tuple[float, float, float], float | None]]
# Seconds without any progress after which a job counts as hanging.
SILENCE = 150.0
RECORDED = 3


@dataclass(frozen=True)
class Settings:
    """Sizes of the model, and how often everything runs."""

    width: int
    inner: int
    blocks: int
    tokens: int
    microbatches: int
    dtype: torch.dtype
    repeats: int
    warm: int


FULL = Settings(2048, 5440, 2, 2048, 8, torch.bfloat16, 9, 3)
TINY = Settings(64, 128, 1, 32, 6, torch.float32, 3, 2)


class _Exchange(torch.autograd.Function):
    """Rows to the other ranks of a group, and gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        result = torch.empty_like(rows)
        dist.all_to_all_single(result, rows.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = torch.empty_like(gradient)
        dist.all_to_all_single(result, gradient.contiguous(), group=ctx.group)
        return result, None


class Block(nn.Module):
    """A dense part, and rows that go to experts and back; without a group they stay here."""

    def __init__(self, settings: Settings, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        width, inner = settings.width, settings.inner
        self.group = group
        self.norm, self.before = nn.RMSNorm(width), nn.RMSNorm(width)
        self.up, self.down = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )
        self.expert_up = nn.Linear(width, inner, bias=False)
        self.expert_down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        rows = self._exchange(self.before(x))
        rows = self.expert_down(nn.functional.silu(self.expert_up(rows)))
        mixed: torch.Tensor = x + self._exchange(rows)
        return mixed

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return rows.clone()
        result: torch.Tensor = _Exchange.apply(rows, self.group)  # type: ignore[no-untyped-call]  # untyped upstream
        return result


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


@dataclass(frozen=True)
class Way:
    """One way to run a schedule."""

    schedule: str
    who: str
    communicates: bool

    def __str__(self) -> str:
        return f"{self.schedule}, {self.who}" + ("" if self.communicates else ", copies only")


@dataclass
class Runner:
    """What a step of one way calls, and its modules."""

    way: Way
    step: Callable[[], object]
    modules: list[nn.Module]
    pipeline: ps.Pipeline | None


class Rank:
    """What one rank does."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.mesh: DeviceMesh = init_device_mesh(
            device.type, (RANKS // PIPELINE, PIPELINE), mesh_dim_names=("expert", "pipeline")
        )
        self.place = self.mesh["pipeline"].get_local_rank()
        self.meter = Meter(device)
        torch.manual_seed(1 + self.mesh["expert"].get_local_rank())
        rows = settings.microbatches * settings.tokens
        self.x, self.y = torch.randn(2, rows, settings.width).to(device, settings.dtype)

    def stages(self, name: str, *, communicates: bool) -> dict[int, nn.Module]:
        last = 2 * PIPELINE - 1
        mirror = last - self.place if name in V_SHAPED else self.place + PIPELINE
        group = self.mesh["expert"].get_group() if communicates else None
        return {stage: self.module(stage, group) for stage in (self.place, mirror)}

    def module(self, stage: int, group: dist.ProcessGroup | None) -> nn.Module:
        torch.manual_seed(100 + stage)
        made = [Block(self.settings, group) for _ in range(self.settings.blocks)]
        return nn.Sequential(*made).to(self.device, self.settings.dtype)

    def ours(self, way: Way) -> Runner:
        own = self.stages(way.schedule, communicates=way.communicates)
        finds = "one after the other" not in way.who
        pipeline = ps.Pipeline(
            own,
            way.schedule,
            microbatches=self.settings.microbatches,
            loss=loss_of,
            reduction="mean",
            group=self.mesh["pipeline"],
            device=self.device,
            options=ps.RunOptions(find_turning_points=finds, compare_data=False),
        )
        step = partial(pipeline.step, self.x, target=self.y)
        return Runner(way, step, list(own.values()), pipeline)

    def theirs(self, way: Way) -> Runner:
        own = self.stages(way.schedule, communicates=way.communicates)
        count = 2 * PIPELINE
        stages = [
            torch_pipelining.PipelineStage(
                module, index, count, self.device, group=self.mesh["pipeline"].get_group()
            )
            for index, module in own.items()
        ]
        kind = getattr(torch_pipelining, dict(SCHEDULES)[way.schedule])
        schedule = kind(stages, self.settings.microbatches, loss_fn=loss_of)
        args = (self.x,) if 0 in own else ()
        named = {"target": self.y, "losses": []} if count - 1 in own else {}
        step = partial(schedule.step, *args, **named, return_outputs=False)
        return Runner(way, step, list(own.values()), None)

    def clear(self, runner: Runner) -> None:
        for module in runner.modules:
            module.zero_grad(set_to_none=True)

    def time(self, runner: Runner) -> float:
        self.clear(runner)
        return self.meter.time(runner.step)

    def simulated(self, runner: Runner) -> float | None:
        """Return the step that recorded actions make, with what their pairs have gained."""
        if runner.pipeline is None:
            return None
        timelines = []
        for _ in range(RECORDED):
            self.clear(runner)
            timelines.append(runner.pipeline.step(self.x, target=self.y, record=True).timeline)
        known = [timeline for timeline in timelines if timeline is not None]
        built = ps.build(
            runner.way.schedule, ranks=PIPELINE, microbatches=self.settings.microbatches
        )
        return ps.simulate(built, costs_of(*known)).end_time

    def share(self) -> float:
        """Return how much of the forward of a stage is communication."""
        batch = self.x[: self.settings.tokens]
        group = self.mesh["expert"].get_group()
        stages = self.module(0, group), self.module(0, None)
        found = take_turns(stages, 12, lambda stage: self.meter.time(lambda: stage(batch), 4))
        with_rows, without = (spread_of(times[2:])[1] for times in found)
        return 1 - without / with_rows


def run_ways(
    ways: Sequence[Way], settings: Settings, _: int, device: torch.device, say: Say
) -> None:
    """Measure all ways in turns; the first rank says what came out."""
    rank = Rank(settings, device)
    share = rank.share()
    runners = []
    for way in ways:
        runner = rank.theirs(way) if way.who.startswith("torch") else rank.ours(way)
        for _turn in range(settings.warm):
            rank.time(runner)
        runners.append(runner)
        if dist.get_rank() == 0:
            say("progress", str(way))
    times = take_turns(runners, settings.repeats, rank.time)
    for runner, seconds in zip(runners, times, strict=True):
        simulated = rank.simulated(runner)
        if dist.get_rank() == 0:
            say("row", (runner.way, spread_of(seconds), simulated))
    if dist.get_rank() == 0:
        say("share", share)
    for runner in runners:
        if runner.pipeline is not None:
            runner.pipeline.close()


def ways_of(name: str) -> list[Way]:
    who = ["torch", "penstock"] + ["penstock, one after the other"] * (name == "DualPipeV")
    return [Way(name, one, communicates) for one in who for communicates in (True, False)]


def table_of(rows: Rows) -> list[str]:
    """Return the table of one schedule."""
    lines = [
        "| schedule | who | ms (quartiles) | exposed communication, ms | simulated, ms (measured "
        "over it) |",
        "|---|---|---|---|---|",
    ]
    for way, ((low, middle, high), simulated) in rows.items():
        if not way.communicates:
            continue
        alone = rows[Way(way.schedule, way.who, communicates=False)][0][1]
        beside = "" if simulated is None else f"{1e3 * simulated:.1f} ({middle / simulated:.3f})"
        lines.append(
            f"| {way.schedule} | {way.who} | {1e3 * middle:.1f} ({1e3 * low:.1f} to "
            f"{1e3 * high:.1f}) | {1e3 * (middle - alone):.1f} | {beside} |"
        )
    return lines


def dense_line(rows: Rows) -> str:
    """Return what looking for turning points costs where there are none."""
    looking = rows[Way("DualPipeV", "penstock", communicates=False)][0]
    leaving = rows[Way("DualPipeV", "penstock, one after the other", communicates=False)][0]
    return (
        f"Without communication, DualPipeV takes {looking[1] / leaving[1]:.3f} of what it takes "
        "if turning points are not looked for."
    )


def bench(settings: Settings, *, on_cpu: bool) -> list[str]:
    """Run every schedule in a job of its own; return the sections of the result."""
    everything: Rows = {}
    lines: list[str] = []
    shares: list[float] = []
    for name, _ in SCHEDULES:
        rows: Rows = {}
        job = partial(run_ways, ways_of(name), settings)
        try:
            for kind, value in run_job(job, RANKS, on_cpu=on_cpu, silence=SILENCE):
                if kind == "row":
                    rows[value[0]] = value[1:]
                elif kind == "share":
                    shares.append(value)
                else:
                    print(value, file=sys.stderr, flush=True)
        except JobError as error:
            lines += [f"{name} failed: {str(error).splitlines()[0]}", ""]
            print(error, file=sys.stderr, flush=True)
            continue
        lines += [*table_of(rows), ""]
        print("\n".join(table_of(rows)), flush=True)
        everything |= rows
    if Way("DualPipeV", "penstock", communicates=False) in everything:
        lines += [dense_line(everything), ""]
    if shares:
        lines.append(f"Communication is {max(shares):.0%} of a forward of one stage alone.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on CPU")
    parser.add_argument("--tokens", type=int, help="rows of a microbatch")
    parser.add_argument("--inner", type=int, help="the width inside of blocks and experts")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, but torch sees none; try --rehearse")
    given = TINY if options.rehearse else FULL
    changes = {name: getattr(options, name) for name in ("tokens", "inner")}
    changes["repeats"] = 4 if options.quick else None
    settings = replace(given, **{name: one for name, one in changes.items() if one is not None})
    if options.rehearse:
        print("\n".join(bench(settings, on_cpu=True)))
        return
    share = 100 // RANKS
    with shared_device(RANKS, share):
        lines = bench(settings, on_cpu=False)
    head = (
        f"{describe_device(RANKS, share)}. {settings.blocks} blocks of d={settings.width} a "
        f"stage, {settings.inner} inside, {settings.tokens} rows a microbatch, "
        f"{settings.microbatches} microbatches, bf16; two pipeline ranks times two expert ranks."
    )
    spread = f"medians of {settings.repeats} repeats in turns, with quartiles"
    text = "\n".join([head, "", *lines])
    print(write_result("overlap", "Hidden exchanges", [text], spread=spread))


if __name__ == "__main__":
    main()
