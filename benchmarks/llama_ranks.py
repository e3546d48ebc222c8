"""A Llama of Hugging Face on several GPU ranks: planned from measured costs, beside torch.

    python benchmarks/llama_ranks.py              about 1.1 billion parameters, four ranks
    python benchmarks/llama_ranks.py --quick      fewer repeats, two placements
    python benchmarks/llama_ranks.py --rehearse   a tiny model on CPU over gloo

With fewer GPUs than ranks, all ranks share the first one; see ranks_on_one_gpu.py.

1. Costs are measured on all ranks at once, because ranks that share a device slow each other
   down: those of each layer, then those of the stages that the layers are cut into.
2. For each placement (one stage per rank, two in a loop, two in a V) the layers are cut so that
   the slowest stage is fastest, and a schedule is planned from the measured costs.
3. On each placement, Penstock trains with the plan, over NCCL and over peer memory, and torch with
   all its families for that placement, on the same stages, in turns.
4. Torch's fastest family, the plan with the shortest predicted step, and the fastest one if that
   is another take turns once more.

A step is the same for all: gradients are cleared, a batch runs forward and backward without
outputs, gradients are clipped by the norm of the whole model's, and AdamW updates the weights.
Seconds are from idle devices to idle devices on the slowest rank, medians with quartiles.
"Simulated" is the order of forwards and backwards alone at the measured costs. Peak memory is that
of torch's allocator, weights and optimizer included, without what the other runners hold.

What fails or hangs gets a row that says so, and the rest runs without it.
Prints its tables and writes them to benchmarks/results/llama_ranks.md.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import torch

import penstock as ps
from llama_model import FAMILIES, Shape
from llama_work import SECONDS, Entry, Row, Settings, compare, join_sizes, measure_costs
from rank_jobs import JobError, run_job
from ranks_on_one_gpu import shared_device
from result_files import write_result

FULL = Shape(2048, 8192, 16, 32, 32000, 2048, 8)
TINY = Shape(32, 48, 11, 4, 64, 16, 8)
QUICK = ("loop", "v")
# Seconds without any progress after which a runner counts as hanging.
SILENCE = 150.0
SECONDS_TO_PLAN = 5.0
_Costs = Mapping[str, tuple[tuple[int, ...], ps.Costs]]


class Bench:
    """The tables, as far as they have come."""

    def __init__(self, settings: Settings, options: argparse.Namespace) -> None:
        self.settings, self.options = settings, options
        self.began = monotonic()
        self.lines: list[str] = []
        self.where = "GPUs"
        self.memory: float | None = None

    @property
    def seconds_left(self) -> float:
        return float(self.options.limit) - (monotonic() - self.began)

    def tell(self, what: str) -> None:
        """Show progress beside the tables."""
        print(f"{monotonic() - self.began:4.0f} s: {what}", file=sys.stderr, flush=True)

    def write(self, *lines: str) -> None:
        """Print lines, and keep them in the file too, whatever comes later."""
        self.lines += lines
        print("\n".join(lines), flush=True)
        if not (self.options.quick or self.options.rehearse):
            spread = f"medians of {self.options.repeats} repeats in turns, with quartiles"
            title, text = "A Llama on several GPU ranks", "\n".join(self.lines)
            write_result("llama_ranks", title, [text], spread=spread, device=self.where)

    def measure(self, placements: Sequence[str]) -> _Costs:
        self.tell("measuring the layers on all ranks")
        job = partial(measure_costs, self.settings, placements)
        for kind, value in self._run(job):
            if kind == "costs":
                found: _Costs = value
                return found
            if kind == "device":
                self.where, self.memory = value
                self.tell(self.where)
            else:
                self.tell(value)
        raise JobError("the ranks ended without costs")

    def _run(self, job: Callable[..., None]) -> Any:
        settings = self.settings
        silence = min(SILENCE, max(1.0, self.seconds_left))
        return run_job(job, settings.ranks, on_cpu=settings.on_cpu, silence=silence)

    def plan(self, costs: _Costs) -> dict[str, ps.planner.Plan]:
        """Plan for each placement, and say what is predicted."""
        plans = {}
        for name, (sizes, measured) in costs.items():
            plan = ps.plan(
                measured,
                ranks=self.settings.ranks,
                microbatches=self.settings.shape.microbatches,
                placement=self.settings.placement(name),
                memory=self.memory,
                seconds=SECONDS_TO_PLAN,
            )
            plans[name] = plan
            work = max(plan.timeline.busy_seconds)
            self.write(
                f"- {name}, stages of {join_sizes(sizes)} layers: predicted step "
                f"{1e3 * plan.timeline.end_time:.1f} ms, proven bound "
                f"{1e3 * plan.lower_bound:.1f}, the busiest rank's own work {1e3 * work:.1f}; "
                f"a microbatch on each stage, ms: {_describe(measured, len(sizes))}"
            )
        return plans

    def entries(self, name: str, costs: _Costs, plan: ps.planner.Plan) -> list[Entry]:
        """Return what runs on a placement: torch's families, and the plan over each transport."""
        sizes, measured = costs[name]
        nccl, *others = ("gloo",) if self.settings.on_cpu else ("nccl", "peer memory")
        made = [
            Entry(family, nccl, name, sizes, None, self._simulate(family, measured))
            for family, (_, placement) in FAMILIES.items()
            if placement == name
        ]
        seconds = plan.timeline.end_time
        title = f"planned, {name}"
        made += [Entry(title, way, name, sizes, plan.schedule, seconds) for way in (nccl, *others)]
        return made

    def _simulate(self, family: str, costs: ps.Costs) -> float:
        settings = self.settings
        order = ps.build(family, ranks=settings.ranks, microbatches=settings.shape.microbatches)
        return ps.simulate(order, costs).end_time

    def run(self, entries: Sequence[Entry], repeats: int) -> list[Row]:
        """Run entries in turns; the row of one that fails says so, and the rest runs again."""
        left = list(entries)
        rows: list[Row] = []
        while left and self.seconds_left > 0:
            rows, current = [], None
            try:
                for kind, value in self._run(partial(compare, self.settings, left, repeats)):
                    if kind == "begin":
                        current = value
                        self.tell("in turns" if value is None else f"building {left[value]}")
                    elif kind == "row":
                        rows.append(value)
                        self.write(str(value))
                return rows
            except JobError as error:
                self.tell(str(error))
                if current is None:
                    self.write("", f"The turns ended early: {_first_line(error)}", "")
                    return rows
                failed = left.pop(current)
                self.write(
                    f"| {failed.schedule} | {failed.who} | {join_sizes(failed.sizes)} "
                    f"| failed: {_first_line(error)} | | | | |"
                )
        for entry in left:
            self.write(f"| {entry.schedule} | {entry.who} | | not run, time was over | | | | |")
        return rows


def _first_line(error: JobError) -> str:
    return str(error).splitlines()[0].replace("|", "/")[:300]


def _describe(costs: ps.Costs, stages: int) -> str:
    letters = zip("FIW", SECONDS, strict=True)
    columns = ((letter, costs.per_stage(name, stages)) for letter, name in letters)
    return "; ".join(
        f"{letter} " + " ".join(f"{1e3 * seconds:.2f}" for seconds in column)
        for letter, column in columns
    )


TABLE = (
    "| schedule | who | layers per stage | one by one, ms (quartiles) | back to back | simulated "
    "(measured over it) | peak MiB | gradient norm, first step |",
    "|---|---|---|---|---|---|---|---|",
)


def bench(own: Bench) -> None:
    settings = own.settings
    count = sum(p.numel() for p in settings.shape.model(torch.device("meta")).parameters())
    own.write(
        f"{settings.shape}; {count / 1e9:.2f} billion parameters in bf16, {settings.ranks} ranks, "
        f"{settings.repeats} repeats.",
        "",
    )
    names = QUICK if own.options.quick else ("loop", "interleaved", "v")
    costs = own.measure(names)
    own.write("Costs measured on all ranks at once:", "")
    plans = own.plan(costs)
    best = min(plans, key=lambda name: plans[name].seconds)
    own.write("", f"Chosen by its prediction: {best}.", "", *TABLE)
    entries = {name: own.entries(name, costs, plans[name]) for name in names}
    rows = [row for name in names for row in own.run(entries[name], settings.repeats)]
    _compare_best(own, rows, best)


def _compare_best(own: Bench, rows: Sequence[Row], best: str) -> None:
    """Let the best of both take turns, and say the ratio."""
    theirs = [row for row in rows if row.entry.order is None]
    ours = [row for row in rows if row.entry.order is not None]
    if not theirs or not ours:
        own.write("", "Nothing to compare.")
        return
    rival, fastest = (min(side, key=lambda row: row.one[1]).entry for side in (theirs, ours))
    chosen = [row.entry for row in ours if row.entry.placement == best]
    others = [fastest] if fastest not in chosen else []
    own.write("", "Torch's fastest family and the best plans in turns:", "", *TABLE)
    last = own.run([rival, *chosen, *others], 2 * own.settings.repeats)
    theirs = [row for row in last if row.entry.order is None]
    own.write("")
    for row in last:
        if row.entry.order is not None and theirs:
            ratio = row.one[1] / theirs[0].one[1]
            own.write(f"- {row.entry} takes {ratio:.3f} of the step of {rival}, medians.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    counts = {"ranks": 4, "repeats": 9, "warm": 2, "many": 4, "share": 0, "limit": 420}
    for name, value in counts.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, two placements")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on CPU")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, but torch sees none; try --rehearse")
    options.share = options.share or 100 // options.ranks
    repeats = 4 if options.quick else options.repeats
    shape = TINY if options.rehearse else FULL
    settings = Settings(
        shape, options.ranks, options.rehearse, options.warm, repeats, options.many, options.share
    )
    own = Bench(settings, options)
    if options.rehearse:
        bench(own)
    else:
        with shared_device(options.ranks, options.share):
            bench(own)


if __name__ == "__main__":
    main()
