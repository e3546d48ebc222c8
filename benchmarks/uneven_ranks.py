"""Plans for uneven models on GPU ranks, beside every fixed family.

    python benchmarks/uneven_ranks.py              four ranks
    python benchmarks/uneven_ranks.py --case 0     only this model
    python benchmarks/uneven_ranks.py --rehearse   tiny models on CPU over gloo

With fewer GPUs than ranks, all ranks share the first one; see ranks_on_one_gpu.py.

The models are those of planned_step.py, larger: a large vocabulary at both ends, an encoder and a
decoder, and equal layers with a rank that has two thirds of the others' part of the GPU. Layers
are measured on all ranks at once, and a search chooses cuts, placement and order. Every fixed
family of one copy runs the same model cut in two ways: with the same number of layers for each
stage, and by `partition`, so that stages are as even as they can be. Those that are predicted to
be fastest run. All have the same limit of memory, 1.3 times what the fastest family with even cuts
needs. The plan is then made again from its own recorded steps.

All run on Penstock over the same transport and take turns. Seconds are from idle devices to idle
devices on the slowest rank, medians with quartiles.
Prints its tables and writes them to benchmarks/results/uneven_ranks.md.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import PenstockError
from penstock.measuring.stages import measure_closely
from penstock.planner.partition.partition import partition
from penstock.planner.partition.pieces import Piece
from penstock.planner.plans import Plan
from penstock.planner.revision import revise
from penstock.planner.search.search import search
from penstock.schedules.registry import FAMILIES
from rank_jobs import JobError, Say, run_job
from ranks_on_one_gpu import Meter, describe_device, shared_device, spread_of, take_turns
from result_files import write_result

RANKS, MICROBATCHES = 4, 8
# The limit of all, as a multiple of what the fastest family with even cuts needs.
ROOM = 1.3
# The families that are predicted to be fastest run, these many for each way to cut.
MOST_RIVALS = 2
RECORDED_STEPS = 7
SEARCH_SECONDS, REVISE_SECONDS = 6.0, 3.0
# Ranks whose layers take nearly the same are equally fast.
LEVEL = 1.08
# Seconds without any progress after which a job counts as hanging.
SILENCE = 120.0


@dataclass(frozen=True)
class Size:
    """How large the models are, and how often everything runs."""

    rows: int
    width: int
    vocabulary: int
    dtype: torch.dtype
    repeats: int


FULL = Size(4096, 2048, 65536, torch.bfloat16, 9)
TINY = Size(16, 32, 64, torch.float32, 3)


@dataclass(frozen=True)
class Case:
    """A model as a list of layers: how wide each block is inside, and what else it has.

    `shares` are the percents of the GPU's multiprocessors that each rank gets.
    """

    name: str
    widths: tuple[int, ...]
    has_vocabulary: bool = False
    shares: tuple[int, ...] = (25,) * RANKS


CASES = (
    Case("large vocabulary at both ends", (4,) * 16, has_vocabulary=True),
    Case("encoder and decoder", (8,) * 8 + (3,) * 12),
    Case("one slow rank", (4,) * 16, shares=(25, 25, 17, 25)),
)


class Block(nn.Module):
    """A residual block of two matrices, `wide` times as wide inside."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, wide * width, bias=False),
            nn.GELU(),
            nn.Linear(wide * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]  # modules are untyped


@dataclass(frozen=True)
class Runner:
    """An order with the cut of the model that it runs."""

    name: str
    sizes: tuple[int, ...]
    order: ps.Schedule | Plan
    predicted: float
    peak_bytes: float


class Rank:
    """What one rank has of a case."""

    def __init__(self, case: Case, size: Size, device: torch.device) -> None:
        self.case, self.size, self.device = case, size, device
        self.meter = Meter(device)
        torch.manual_seed(0)
        with device:
            made: list[nn.Module] = [Block(size.width, wide) for wide in case.widths]
            if case.has_vocabulary:
                first = nn.Embedding(size.vocabulary, size.width)
                made = [first, *made, nn.Linear(size.width, size.vocabulary, bias=False)]
        self.layers = [layer.to(size.dtype) for layer in made]
        self.loss = nn.CrossEntropyLoss() if case.has_vocabulary else nn.MSELoss()
        self.x, self.y = self._batch(MICROBATCHES * size.rows)
        self._made: list[ps.Pipeline] = []

    def _batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        if self.case.has_vocabulary:
            words = torch.randint(self.size.vocabulary, (2, rows), device=self.device)
            return words[0], words[1]
        both = torch.randn(2, rows, self.size.width, device=self.device, dtype=self.size.dtype)
        return both[0], both[1]

    def measure(self) -> tuple[list[Piece], list[float]]:
        """Return what layers cost, and how much slower than the fastest each rank is."""
        row, target = self.x[: self.size.rows], self.y[: self.size.rows]
        self.meter.meet()
        found = measure_closely(self.layers, example=(row,), loss=self.loss, target=target)
        names = [
            field.name for field in fields(Piece) if field.name not in ("name", "host_action")
        ]
        count = len(self.layers)
        own = np.array([found.costs.per_stage(name, count) for name in names])
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, own, self.meter.host)
        work = np.array([table[:3].sum() for table in everyone])
        level = work < LEVEL * work.min()
        # Seconds are those of the fastest ranks; bytes are the same on all.
        mean = np.mean([table for table, is_one in zip(everyone, level, strict=True) if is_one], 0)
        factors = np.where(level, 1.0, work / work[level].mean())
        host = found.costs.host_action
        pieces = [
            Piece(
                f"{number}",
                **dict(zip(names, map(float, mean[:, number]), strict=True)),
                host_action=host,
            )
            for number in range(count)
        ]
        return pieces, factors.tolist()

    def share(self, make: Callable[[], Any]) -> Any:
        """Return what rank 0 makes."""
        box = [make() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self.meter.host)
        return box[0]

    def pipeline(self, one: Runner) -> ps.Pipeline:
        ends = (0, *accumulate(one.sizes))
        made = ps.Pipeline(
            [nn.Sequential(*self.layers[begin:end]) for begin, end in pairwise(ends)],
            one.order,
            loss=self.loss,
            reduction="mean",
            group=dist.group.WORLD,
            device=self.device,
            options=ps.RunOptions(compare_data=False),
        )
        self._made.append(made)
        return made

    def close(self) -> None:
        for one in self._made:
            one.close()

    def record(self, pipeline: ps.Pipeline) -> list[ps.Timeline]:
        found = []
        for _ in range(RECORDED_STEPS + 2):
            self.clear()
            found.append(pipeline.step(self.x, target=self.y, record=True).timeline)
        return [one for one in found[2:] if one is not None]

    def clear(self) -> None:
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)

    def time(self, pipeline: ps.Pipeline) -> float:
        self.clear()
        return self.meter.time(lambda: pipeline.step(self.x, target=self.y))


def run_case(case: Case, size: Size, rank: int, device: torch.device, say: Say) -> None:
    """Plan, and let the plans and the families take turns; the first rank says what came out."""

    def note(kind: str, value: Any) -> None:
        if rank == 0:
            say(kind, value)

    own = Rank(case, size, device)
    pieces, factors = own.measure()
    note("factors", factors)
    found = own.share(partial(_choose, pieces, factors))
    planned, *rivals = found
    pipelines = {planned: own.pipeline(planned)}
    note("progress", "recording the plan")
    recorded = own.record(pipelines[planned])
    again = own.share(lambda: revise(planned.order, *recorded, seconds=REVISE_SECONDS).new)
    others = [_runner("planned again", again, planned.sizes), *rivals]
    pipelines |= {one: own.pipeline(one) for one in others}
    for pipeline in pipelines.values():
        for _ in range(3):
            own.time(pipeline)
        note("progress", "built and warm")

    def measure(pipeline: ps.Pipeline) -> float:
        note("progress", "")
        return own.time(pipeline)

    times = take_turns(list(pipelines.values()), size.repeats, measure)
    for one, seconds in zip(pipelines, times, strict=True):
        note("row", (one, spread_of(seconds)))
    note("bound", again.lower_bound)
    own.meter.meet()
    own.close()


def _choose(pieces: Sequence[Piece], factors: Sequence[float]) -> list[Runner]:
    """Return the plan, and the families that are predicted to be fastest for each way to cut."""
    families = {way: list(_rivals(pieces, factors, way)) for way in ("even", "balanced")}
    memory = ROOM * min(families["even"], key=_predicted).peak_bytes
    found = search(
        pieces,
        ranks=RANKS,
        batch=MICROBATCHES,
        memory=memory,
        rank_factors=factors,
        seconds=SEARCH_SECONDS,
    )
    plan, choices = next(
        (one.plan, one.choices) for one in found.found if not one.choices.checkpointed
    )
    chosen = [_runner("planned", plan, choices.sizes)]
    for rivals in families.values():
        fitting = [one for one in rivals if one.peak_bytes <= memory]
        chosen += sorted(fitting, key=_predicted)[:MOST_RIVALS]
    return chosen


def _predicted(one: Runner) -> float:
    return one.predicted


def _runner(name: str, plan: Plan, sizes: tuple[int, ...]) -> Runner:
    return Runner(name, sizes, plan, plan.seconds, plan.timeline.peak_bytes)


def _rivals(pieces: Sequence[Piece], factors: Sequence[float], way: str) -> Iterator[Runner]:
    """Yield every family that the model can run with, cut in one of the two ways."""
    placements = (ps.Placement.loop(RANKS, 1), ps.Placement.loop(RANKS, 2), ps.Placement.v(RANKS))
    for placement in placements:
        stages = placement.num_stages
        balanced = partition(pieces, placement)
        each, more = divmod(len(pieces), stages)
        even = tuple(each + (stage < more) for stage in range(stages))
        sizes = balanced.sizes if way == "balanced" else even
        costs = replace(balanced, cuts=(0, *accumulate(sizes))).to_costs()
        slower = np.array(factors)[list(placement.rank_of_stage)]
        costs = replace(
            costs,
            **{
                name: (slower * costs.per_stage(name, stages)).tolist()
                for name in ("forward", "backward_input", "backward_weight")
            },
        )
        for name in FAMILIES:
            try:
                schedule = ps.build(
                    name, ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=stages // RANKS
                )
            except PenstockError:
                continue
            is_chain = schedule.dataflow == ps.Dataflow.chain(stages)
            if is_chain and not schedule.is_forward_only and schedule.placement == placement:
                timeline = ps.simulate(schedule, costs)
                peak = timeline.peak_bytes
                yield Runner(f"{name}, {way}", sizes, schedule, timeline.end_time, peak)


def bench(case: Case, size: Size, *, on_cpu: bool) -> str:
    """Return the section of one case."""
    rows: dict[Runner, tuple[float, float, float]] = {}
    said: dict[str, Any] = {}
    job = partial(run_case, case, size)
    shares = None if on_cpu else case.shares
    lines = [f"## {case.name}: {len(case.widths) + 2 * case.has_vocabulary} layers", ""]
    try:
        for kind, value in run_job(job, RANKS, on_cpu=on_cpu, silence=SILENCE, shares=shares):
            if kind == "row":
                rows[value[0]] = value[1]
            elif kind == "progress":
                print(value, end=" ", file=sys.stderr, flush=True)
            else:
                said[kind] = value
    except JobError as error:
        print(error, file=sys.stderr)
        lines.append(f"Failed: {str(error).splitlines()[0]}")
        return "\n".join(lines)
    medians = {one.name: middle for one, (_, middle, _) in rows.items()}
    planned = medians["planned again"]
    lines += [
        "| schedule | layers per stage | peak MiB | predicted ms | measured ms (quartiles) "
        "| measured / predicted | measured / planned again |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, (low, middle, high) in rows.items():
        lines.append(
            f"| {one.name} | {' '.join(map(str, one.sizes))} | {one.peak_bytes / 2**20:.0f} "
            f"| {1e3 * one.predicted:.1f} | {1e3 * middle:.1f} ({1e3 * low:.1f} to "
            f"{1e3 * high:.1f}) | {middle / one.predicted:.3f} | {middle / planned:.3f} |"
        )
    lines.append("")
    for way in ("even", "balanced"):
        rivals = {name: seconds for name, seconds in medians.items() if name.endswith(way)}
        best = min(rivals, key=lambda name: rivals[name])
        lines.append(
            f"The best family with {way} cuts, {best}, is {rivals[best] / planned:.3f} "
            "of the plan."
        )
    factors = " ".join(f"{factor:.2f}" for factor in said["factors"])
    lines.append(
        f"Ranks take {factors} of the fastest one's seconds. Planned from recorded steps, no "
        f"schedule with this cut and memory is faster than {1e3 * said['bound']:.1f} ms."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this case")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on CPU")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, but torch sees none; try --rehearse")
    chosen = CASES if options.case is None else (CASES[options.case],)
    if options.rehearse:
        for case in chosen:
            print(bench(case, TINY, on_cpu=True), flush=True)
        return
    share = 100 // RANKS
    sections = [
        f"{describe_device(RANKS, share)}, messages by peer memory. Blocks of two matrices of "
        f"width {FULL.width}, {FULL.rows} rows a microbatch, {MICROBATCHES} microbatches, a "
        f"vocabulary of {FULL.vocabulary}, bf16."
    ]
    with shared_device(RANKS, share):
        for case in chosen:
            sections.append(bench(case, FULL, on_cpu=False))
            print(sections[-1], flush=True)
    spread = f"medians of {FULL.repeats} repeats in turns, with quartiles"
    write_result("uneven_ranks", "Uneven models on GPU ranks", sections, spread=spread)


if __name__ == "__main__":
    main()
