"""What every rank of llama_ranks.py runs: measuring costs, and training steps in turns."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import penstock as ps
from llama_model import LAYERS, Runner, Shape, loss_of, train_ours, train_theirs
from penstock.measuring.host_link import measure_host_link
from rank_jobs import Say
from ranks_on_one_gpu import Meter, describe_device, is_device_shared, spread_of, take_turns

SECONDS = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Settings:
    """What all ranks need to know."""

    shape: Shape
    ranks: int
    on_cpu: bool
    warm: int
    repeats: int
    many: int
    share: int

    def placement(self, name: str) -> ps.Placement:
        if name == "v":
            return ps.Placement.v(self.ranks)
        return ps.Placement.loop(self.ranks, 1 if name == "loop" else 2)


@dataclass(frozen=True)
class Entry:
    """A runner before it is built."""

    schedule: str
    transport: str
    placement: str
    sizes: tuple[int, ...]
    order: ps.Schedule | None
    simulated: float

    @property
    def who(self) -> str:
        return f"{'torch' if self.order is None else 'penstock'}, {self.transport}"

    def __str__(self) -> str:
        return f"{self.schedule} ({self.who})"


@dataclass(frozen=True)
class Row:
    """What was measured of one entry; one by one are the quartiles around the median."""

    entry: Entry
    one: tuple[float, float, float]
    many: float
    norm: float
    peak: float

    def __str__(self) -> str:
        low, middle, high = (1e3 * seconds for seconds in self.one)
        simulated = 1e3 * self.entry.simulated
        return (
            f"| {self.entry.schedule} | {self.entry.who} | {join_sizes(self.entry.sizes)} "
            f"| {middle:.1f} ({low:.1f} to {high:.1f}) | {1e3 * self.many:.1f} "
            f"| {simulated:.1f} ({middle / simulated:.2f}) | {self.peak:.0f} | {self.norm:.4f} |"
        )


def join_sizes(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes))


def measure_costs(
    settings: Settings, placements: Sequence[str], rank: int, device: torch.device, say: Say
) -> None:
    """Measure layers, cut them for each placement, and measure these stages; all ranks at once."""
    shape, meter = settings.shape, Meter(device)
    if rank == 0:
        say("device", _describe_device(settings, device))
    tokens, target = shape.batch(device)
    row: dict[str, Any] = {"loss": loss_of, "target": target[:1]}
    meter.meet()
    pieces = ps.measure_layers(
        shape.model(device), layers=LAYERS, example=(tokens[:1],), device=device, **row
    )
    everyone = _gather(pieces, meter)
    pieces = tuple(_mean(each, SECONDS) for each in zip(*everyone, strict=True))
    found: dict[str, Any] = {}
    for name in placements:
        if rank == 0:
            say("progress", f"measuring the stages of {name}")
        sizes = ps.partition(pieces, settings.placement(name)).sizes
        pipe = shape.split(device, sizes)
        meter.meet()
        costs = ps.measure(
            pipe,
            example=(tokens[:1],),
            device=device,
            optimizer=partial(torch.optim.AdamW, fused=True),
            **row,
        )
        found[name] = sizes, _mean(_gather(costs, meter), (*SECONDS, "full_backward"))
        # Each rank has found its link free; here all use theirs at once.
        meter.meet()
        links = _gather(measure_host_link(device), meter)
        found[name] = (
            sizes,
            replace(found[name][1], host_link=None if None in links else min(links)),
        )
        del pipe
        _free()
    if rank == 0:
        say("costs", found)


def _describe_device(settings: Settings, device: torch.device) -> tuple[str, float | None]:
    """Return a description of the device, and the bytes that each rank may use of it.

    That is four fifths of the rank's share.
    """
    if settings.on_cpu:
        return "CPU", None
    ranks = settings.ranks
    size = torch.cuda.get_device_properties(device).total_memory
    share = 0.8 * size / (ranks if is_device_shared(ranks) else 1)
    return describe_device(ranks, settings.share), share


def _gather(value: Any, meter: Meter) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value, meter.host)
    return everyone


def _mean(values: Sequence[Any], names: Sequence[str]) -> Any:
    """Return the first of these values with the mean of what all have under these names."""
    means = {}
    for name in names:
        columns = [getattr(value, name) for value in values]
        if isinstance(columns[0], tuple):
            means[name] = tuple(sum(each) / len(each) for each in zip(*columns, strict=True))
        else:
            means[name] = sum(columns) / len(columns)
    return replace(values[0], **means)


def compare(
    settings: Settings,
    entries: Sequence[Entry],
    repeats: int,
    rank: int,
    device: torch.device,
    say: Say,
) -> None:
    """Build what is to run, let it take turns, and say its rows."""
    meter = Meter(device)

    def note(kind: str, value: Any) -> None:
        if rank == 0:
            say(kind, value)

    runners, norms = [], []
    for number, entry in enumerate(entries):
        note("begin", number)
        before = meter.held()
        runner = _make(settings, entry, device)
        norms.append(float(runner.step()))
        for _ in range(settings.warm):
            meter.time(runner.step)
        _free()
        runner.held = meter.held() - before
        runners.append(runner)
    note("begin", None)
    held = sum(runner.held for runner in runners)

    def one(runner: Runner) -> float:
        note("progress", "")
        return meter.time(runner.step)

    ones = take_turns(runners, repeats, one)
    manys = take_turns(runners, 2, lambda runner: meter.time(runner.step, settings.many))
    for number, (entry, runner) in enumerate(zip(entries, runners, strict=True)):
        peak = meter.peak(runner.step, held - runner.held)
        seconds = spread_of(ones[number])
        note("row", Row(entry, seconds, min(manys[number]), norms[number], peak))
    meter.meet()
    for runner in runners:
        runner.close()


def _make(settings: Settings, entry: Entry, device: torch.device) -> Runner:
    shape = settings.shape
    if entry.order is None:
        placement = settings.placement(entry.placement)
        return train_theirs(shape, device, entry.schedule, placement, entry.sizes)
    transport = "auto" if settings.on_cpu else entry.transport
    return train_ours(shape, device, entry.schedule, entry.order, entry.sizes, transport)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
