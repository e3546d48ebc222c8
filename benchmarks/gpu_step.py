"""Whole training steps with all stages on one device, beside a plain loop over microbatches.

    python benchmarks/gpu_step.py                 on CUDA if there is one, else small on CPU
    python benchmarks/gpu_step.py --quick         fewer repeats

Transformer blocks with RMSNorm, attention and SwiGLU. The plain loop runs the unsplit model, one
microbatch after the other. Ours runs every schedule in one process, on one rank as torch can, and
on four ranks that share the device. torch.distributed.pipelining runs on one rank, in a group of
its own. Repeats take turns; times are medians, and ratios medians of ratios within a repeat.
Prints its table and writes it to benchmarks/results/gpu_step.md.
"""

import argparse
import os
import socket
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import penstock as ps
from result_files import write_result
from split_backward import Block, median_ratio, synchronize

MICROBATCHES = 8
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
SCHEDULES += ["DualPipeV"]
SINGLE = ("GPipe", "1F1B")


@dataclass(frozen=True)
class Size:
    width: int
    tokens: int
    blocks: int = 8

    def __str__(self) -> str:
        return f"{self.blocks} blocks, d={self.width}, t={self.tokens}"


@dataclass
class Contestant:
    name: str
    step: Callable[[], object]
    model: nn.Module


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def make_blocks(size: Size, device: torch.device) -> list[nn.Module]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [Block(size.width).to(device, dtype) for _ in range(size.blocks)]


def group_blocks(blocks: list[nn.Module], stages: int) -> list[nn.Module]:
    per_stage = len(blocks) // stages
    return [nn.Sequential(*blocks[i * per_stage : (i + 1) * per_stage]) for i in range(stages)]


def make_batch(size: Size, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (2, MICROBATCHES, size.tokens, size.width)
    x, target = torch.randn(shape, device=device, dtype=dtype)
    return x, target


def plain(size: Size, device: torch.device) -> Contestant:
    model = nn.Sequential(*make_blocks(size, device))
    x, target = make_batch(size, device)

    def step() -> None:
        for number in range(MICROBATCHES):
            here = slice(number, number + 1)
            loss = loss_of(model(x[here]), target[here]) / MICROBATCHES
            torch.autograd.backward(loss)

    return Contestant("plain loop", step, model)


def ours(
    size: Size, device: torch.device, schedule: str, ranks: int, *, is_captured: bool = False
) -> Contestant:
    per_rank = 1 if schedule in SINGLE else 2
    stages = group_blocks(make_blocks(size, device), ranks * per_rank)
    pipeline = ps.Pipeline(
        stages,
        schedule,
        microbatches=MICROBATCHES,
        loss=loss_of,
        ranks=ranks,
        device=device,
        options=ps.RunOptions(cuda_graphs=is_captured),
    )
    x, target = make_batch(size, device)
    name = f"ours, {ranks} rank{'s' if ranks > 1 else ''}"
    name += ", CUDA graphs" if is_captured else ""
    return Contestant(name, lambda: pipeline.step(x, target=target), nn.ModuleList(stages))


def torchs(size: Size, device: torch.device, schedule: str) -> Contestant:
    modules = group_blocks(make_blocks(size, device), 1 if schedule in SINGLE else 2)
    stages = [PipelineStage(m, i, len(modules), device) for i, m in enumerate(modules)]
    given = stages[0] if schedule in SINGLE else stages
    runner = get_schedule_class(schedule)(given, MICROBATCHES, loss_fn=loss_of)
    x, target = make_batch(size, device)
    return Contestant("torch", lambda: runner.step(x, target=target), nn.ModuleList(modules))


def time_step(contestant: Contestant, device: torch.device) -> float:
    contestant.model.zero_grad()
    synchronize(device)
    start = perf_counter()
    contestant.step()
    synchronize(device)
    return perf_counter() - start


def peak_bytes(contestant: Contestant, device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    contestant.model.zero_grad()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    contestant.step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def rows_of(schedule: str, size: Size, device: torch.device, repeats: int) -> list[str]:
    contestants = [plain(size, device), ours(size, device, schedule, 1)]
    if device.type == "cuda":
        contestants.append(ours(size, device, schedule, 1, is_captured=True))
    contestants += [ours(size, device, schedule, 4), torchs(size, device, schedule)]
    for contestant in contestants:
        print(f"{schedule}: {contestant.name}", file=sys.stderr, flush=True)
        for _ in range(3):
            contestant.step()
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for repeat in range(repeats):
        for contestant in contestants[::-1] if repeat % 2 else contestants:
            seconds[contestant.name].append(time_step(contestant, device))
    lines = []
    for contestant in contestants:
        taken, peak = statistics.median(seconds[contestant.name]), peak_bytes(contestant, device)
        memory = "-" if peak is None else f"{peak / 2**20:.0f}"
        lines.append(
            f"| {schedule} | {contestant.name} | {1e3 * taken:.1f} "
            f"| {median_ratio(seconds[contestant.name], seconds['plain loop'])} | {memory} |"
        )
    return lines


def start_group(device: torch.device) -> None:
    """Start a process group of this process alone, which torch's schedules ask for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    repeats = 5 if parser.parse_args().quick else 25
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = Size(2048, 2048) if device.type == "cuda" else Size(64, 64)
    start_group(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    lines = [
        f"{size}, {MICROBATCHES} microbatches; MiB is the peak above what is held before.",
        "",
    ]
    lines += ["| schedule | run | ms per step | over plain | MiB |", "|---|---|---|---|---|"]
    for schedule in SCHEDULES:
        lines += rows_of(schedule, size, device, repeats)
    dist.destroy_process_group()
    spread = f"medians of {repeats} repeats in turns; ratios are medians of ratios of one repeat"
    title = "Whole steps on one device"
    text = "\n".join(lines)
    print(write_result("gpu_step", title, [text], spread=spread, device=name))


if __name__ == "__main__":
    main()
