"""The split backward of one stage, beside a plain backward and torch.distributed.pipelining.

    python benchmarks/split_backward.py                 on CUDA if there is one, else small on CPU
    python benchmarks/split_backward.py --quick         fewer repeats

Transformer blocks with RMSNorm, attention and SwiGLU. Plain is autograd's forward and backward, as
it comes and in the calling thread only, which is faster where the host is what limits;
ours and torch's run F, I and W of the same blocks: in eager mode, with every block under
`torch.compile`, and as CUDA graphs. What counts is the time of a run in a loop without pauses, as
in training; phases are timed one by one beside it. Repeats take turns; times are medians, and
ratios medians of ratios within a repeat. Prints its tables and writes them to
benchmarks/results/split_backward.md.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn
from torch.autograd.grad_mode import set_multithreading_enabled
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils.checkpoint import checkpoint

from penstock.parallel.replica import replica_of
from penstock.step.stage import Stage
from penstock.tensors.packet import Packet
from result_files import write_result


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    tokens: int

    def __str__(self) -> str:
        return f"d={self.width} L={self.layers} t={self.tokens}"

    @property
    def hidden(self) -> int:
        return hidden_width(self.width)

    @property
    def stash_bytes(self) -> int:
        """What W needs in bfloat16: four inputs and the gradients of seven outputs per block."""
        inputs = 3 * self.width + self.hidden
        gradients = 5 * self.width + 2 * self.hidden
        return 2 * self.layers * self.tokens * (inputs + gradients)


def hidden_width(width: int) -> int:
    return width * 8 // 3 // 64 * 64


CUDA_SHAPES = [Shape(4096, 4, 4096), Shape(2048, 16, 2048), Shape(1024, 8, 512)]
CPU_SHAPES = [Shape(256, 4, 256), Shape(128, 8, 64)]


class Block(nn.Module):
    def __init__(self, width: int, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.is_checkpointed, self.runs = is_checkpointed, 0
        hidden = hidden_width(width)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            result: torch.Tensor = checkpoint(self.compute_and_count, x, use_reentrant=False)
            return result
        return self.compute(x)

    def compute_and_count(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Job:
    """Blocks with an input and an output gradient; `phases` is one run, phase by phase."""

    names: tuple[str, ...]

    def __init__(self, model: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
        self.model, self.x, self.gradient = model, x, gradient

    def phases(self) -> Iterator[None]:
        raise NotImplementedError


class Plain(Job):
    names = ("F", "B")

    def phases(self) -> Iterator[None]:
        x = self.x.detach().requires_grad_()
        y = self.model(x)
        yield
        y.backward(self.gradient)
        del x, y
        yield


class PlainInOneThread(Plain):
    """Autograd in the calling thread, where ours runs too; for CUDA it has one of its own."""

    def phases(self) -> Iterator[None]:
        with set_multithreading_enabled(False):
            yield from super().phases()


class Ours(Job):
    names = ("F", "I", "W")

    def __init__(self, model: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
        super().__init__(model, x, gradient)
        self.stage = Stage(0, model, replica_of(model))
        self.stage.prepare_split()

    def capture(self) -> None:
        self.stage.capture_graphs()

    def phases(self) -> Iterator[None]:
        stage = self.stage
        packet = Packet("T", [self.x.detach().requires_grad_()])
        output, _ = stage.forward(0, [packet], (), {})
        del packet
        stage.depart(0, output, [1])
        del output
        yield
        stage.backward_input(0, [[self.gradient]])
        yield
        stage.backward_weight(0)
        yield


class Torch(Job):
    names = ("F", "I", "W")

    def phases(self) -> Iterator[None]:
        x = self.x.detach().requires_grad_()
        y = self.model(x)
        yield
        weights = list(self.model.parameters())
        groups = stage_backward_input([y], [self.gradient], [x], iter(weights))[1]
        del x, y
        yield
        stage_backward_weight(iter(weights), groups)
        del groups
        yield


@dataclass
class Sample:
    seconds: list[float]
    host: list[float]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sample(job: Job, device: torch.device) -> Sample:
    """Run once; return the seconds per phase on the device and on the host alone."""
    synchronize(device)
    marks, host = [mark(device)], [perf_counter()]
    for _ in job.phases():
        host.append(perf_counter())
        marks.append(mark(device))
    synchronize(device)
    seconds = [elapsed(a, b) for a, b in pairwise(marks)]
    return Sample(seconds, [b - a for a, b in pairwise(host)])


def loop(job: Job, device: torch.device, runs: int = 5) -> float:
    """Seconds of one run, out of several without a pause."""
    synchronize(device)
    start = perf_counter()
    for _ in range(runs):
        for _ in job.phases():
            pass
    synchronize(device)
    return (perf_counter() - start) / runs


def mark(device: torch.device) -> object:
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # upstream
    event.record()
    return event


def elapsed(start: object, end: object) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    return float(start.elapsed_time(end)) / 1e3  # type: ignore[attr-defined]  # CUDA events


def held(job: Job, device: torch.device) -> list[int]:
    """Bytes after each phase, more than before the run."""
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    return [torch.cuda.memory_allocated(device) - before for _ in job.phases()]


def make_model(shape: Shape, device: torch.device, is_checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(shape.width, is_checkpointed) for _ in range(shape.layers)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return nn.Sequential(*blocks).to(device, dtype)


@dataclass(frozen=True)
class Variant:
    kind: type[Job]
    is_compiled: bool = False
    is_captured: bool = False


PLAIN, OURS, TORCH = Variant(Plain), Variant(Ours), Variant(Torch)
EAGER = {"plain": PLAIN, "ours": OURS, "torch": TORCH}
ONE_THREAD = {"plain, one thread": Variant(PlainInOneThread)}
COMPILED = {
    "plain, compiled": Variant(Plain, is_compiled=True),
    "ours, compiled": Variant(Ours, is_compiled=True),
}
CAPTURED = {
    "ours, CUDA graphs": Variant(Ours, is_captured=True),
    "ours, compiled, CUDA graphs": Variant(Ours, is_compiled=True, is_captured=True),
}


def make_job(
    variant: Variant, shape: Shape, device: torch.device, is_checkpointed: bool = False
) -> Job:
    model = make_model(shape, device, is_checkpointed)
    dtype = next(model.parameters()).dtype
    if variant.is_compiled:
        for block in model:
            block.compile()
    x, gradient = torch.randn(2, 1, shape.tokens, shape.width, device=device, dtype=dtype)
    job = variant.kind(model, x, gradient)
    if variant.is_captured and isinstance(job, Ours):
        job.capture()
    for _ in range(3):
        for _ in job.phases():
            pass
    return job


def make_jobs(
    variants: dict[str, Variant],
    shape: Shape,
    device: torch.device,
    is_checkpointed: bool = False,
) -> dict[str, Job]:
    return {
        name: make_job(variant, shape, device, is_checkpointed)
        for name, variant in variants.items()
    }


def time_table(shape: Shape, device: torch.device, repeats: int) -> list[str]:
    captured = CAPTURED if device.type == "cuda" else {}
    jobs = make_jobs({**EAGER, **ONE_THREAD, **COMPILED, **captured}, shape, device)
    samples: dict[str, list[Sample]] = {name: [] for name in jobs}
    loops: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(repeats):
        turns = list(jobs.items())
        for name, job in turns[::-1] if repeat % 2 else turns:
            samples[name].append(sample(job, device))
            loops[name].append(loop(job, device))
    lines = []
    for name, job in jobs.items():
        total = statistics.median(loops[name])
        phases = [
            f"{phase} {1e3 * statistics.median(s.seconds[i] for s in samples[name]):.3f}"
            for i, phase in enumerate(job.names)
        ]
        host = statistics.median(sum(s.host) for s in samples[name])
        over_plain = median_ratio(loops[name], loops["plain"])
        is_compiled = "compiled" in name
        over_compiled = median_ratio(loops[name], loops["plain, compiled"]) if is_compiled else ""
        lines.append(
            f"| {shape} | {name} | {', '.join(phases)} | {1e3 * total:.3f} | {over_plain} "
            f"| {over_compiled} | {1e3 * host:.3f} | {memory(job, device)} "
            f"| {shape.stash_bytes / 2**20:.0f} |"
        )
    return lines


def median_ratio(times: list[float], others: list[float]) -> str:
    """Return the median of ratios of neighbouring runs, since a machine changes its speed."""
    ratios = [time / other for time, other in zip(times, others, strict=True)]
    return f"{statistics.median(ratios):.3f}"


def memory(job: Job, device: torch.device) -> str:
    if device.type != "cuda":
        return "-"
    return ", ".join(
        f"{name} {left / 2**20:.0f}"
        for name, left in zip(job.names, held(job, device), strict=True)
    )


def count_table(shape: Shape, device: torch.device) -> list[str]:
    lines = []
    for name, job in make_jobs(EAGER, shape, device, is_checkpointed=True).items():
        blocks = [module for module in job.model.modules() if isinstance(module, Block)]
        before = sum(block.runs for block in blocks)
        for _ in job.phases():
            pass
        runs = (sum(block.runs for block in blocks) - before) / len(blocks)
        lines.append(f"| {name} | {runs:g} |")
    return lines


def scaling_table(width: int, tokens: int, device: torch.device, repeats: int) -> list[str]:
    lines = []
    for layers in (4, 8, 16, 32):
        jobs = make_jobs(EAGER, Shape(width, layers, tokens), device)
        cells = []
        for name in ("plain", "ours", "torch"):
            host = [sum(sample(jobs[name], device).host[1:]) for _ in range(repeats)]
            cells.append(f"{1e3 * statistics.median(host):.3f}")
        lines.append(f"| {layers} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    repeats = 7 if parser.parse_args().quick else 31
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    lines = [
        "| blocks | run | ms per phase | ms in a loop | over plain | over plain, compiled "
        "| host ms | MiB after | W needs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        lines += time_table(shape, device, repeats)
    lines += ["", "Forwards of a checkpointed block:", "", "| run | forwards |", "|---|---|"]
    lines += count_table(Shape(256, 2, 64), device)
    lines += ["", "Host ms of the backward (B, or I and W) by number of blocks:", ""]
    lines += ["| blocks | plain | ours | torch |", "|---|---|---|---|"]
    lines += scaling_table(256, 64, device, repeats)
    spread = f"medians of {repeats} repeats in turns; ratios are medians of ratios of one repeat"
    title = "The split backward of one stage"
    text = "\n".join(lines)
    print(write_result("split_backward", title, [text], spread=spread, device=name))


if __name__ == "__main__":
    main()
