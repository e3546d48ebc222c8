"""Plans that run: uneven models on two gloo processes, predicted beside measured.

    OMP_NUM_THREADS=1 python benchmarks/planned_step.py            on two quiet cores
    OMP_NUM_THREADS=1 python benchmarks/planned_step.py --quick    fewer repeats

The models are uneven as real ones are: a large vocabulary at both ends, an encoder and a decoder,
and a rank that is slower than the other. For each, layers and links are measured, and a search
chooses cuts, placement and order. Every fixed family of one copy runs the same model cut in two
ways: with the same number of layers for each stage, and by `partition`, so that stages are as even
as they can be. All have the same limit of memory, 1.3 times what the fastest family with even cuts
needs. The plan is then made again from its own recorded steps. All take turns, and each number is
a median with the interquartile range as a share of it.

A family at the plan's own cut shows what the order alone is worth; users without a planner do not
have it, so it is not among the rivals. Prints its tables and writes them to
benchmarks/results/planned_step.md.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import PenstockError
from penstock.ir.actions import Action, Kind
from penstock.measuring.links import Links, measure_links
from penstock.measuring.stability import spread_of
from penstock.measuring.stages import measure_closely
from penstock.planner.partition.partition import Partition, partition
from penstock.planner.partition.pieces import Piece
from penstock.planner.plans import Plan
from penstock.planner.revision import revise
from penstock.planner.search.search import search
from penstock.schedules.registry import FAMILIES
from penstock.sim.recorded.difference import Difference
from penstock.sim.recorded.review import review
from penstock.tools.launcher import Report, run_on_ranks
from penstock.training.options import RunOptions
from result_files import write_result

LIMIT_SECONDS = 900
RANKS = 2
ROWS, WIDTH, VOCABULARY = 64, 256, 8192
RECORDED_STEPS = 15
SEARCH_SECONDS = 10.0
# The limit of all, as a multiple of what the fastest family with even cuts needs.
ROOM = 1.3
# Plans that take up to this multiple of the fastest are nearly as fast.
CLOSE = 1.01
# The families that are predicted to be fastest run, these many for each way to cut.
MOST_RIVALS = 3
COMPUTE = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)


class Block(nn.Module):
    """A residual block of two matrices, `wide` times as wide inside."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, wide * WIDTH),
            nn.GELU(),
            nn.Linear(wide * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]  # modules are untyped


@dataclass(frozen=True)
class Case:
    """A model as a list of layers: how wide each block is, and what comes before and after.

    `factors` is what each rank takes for its compute, as a multiple of what it would take.
    """

    name: str
    widths: tuple[int, ...]
    vocabulary: int = 0
    factors: tuple[float, ...] = (1.0, 1.0)
    microbatches: int = 6

    @property
    def loss(self) -> Callable[..., torch.Tensor]:
        """Return the loss of the model."""
        return nn.CrossEntropyLoss() if self.vocabulary else nn.MSELoss()

    def layers(self) -> list[nn.Module]:
        """Make the layers, the same on every rank."""
        torch.manual_seed(0)
        blocks: list[nn.Module] = [Block(wide) for wide in self.widths]
        if self.vocabulary:
            first = nn.Embedding(self.vocabulary, WIDTH)
            return [first, *blocks, nn.Linear(WIDTH, self.vocabulary)]
        return blocks

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a batch of these rows, and what its outputs are compared with."""
        torch.manual_seed(1)
        if self.vocabulary:
            words = torch.randint(self.vocabulary, (2, rows))
            return words[0], words[1]
        return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


CASES = (
    Case("large vocabulary at both ends", (4,) * 6, vocabulary=VOCABULARY),
    Case("encoder and decoder", (8,) * 4 + (3,) * 6),
    Case("one slow rank", (4,) * 8, factors=(1.0, 1.5)),
)


@dataclass(frozen=True)
class Runner:
    """An order with the cut of the model that it runs."""

    sizes: tuple[int, ...]
    schedule: ps.Schedule
    predicted: float
    peak_bytes: float


@dataclass(frozen=True)
class Outcome:
    """What one case gave: what ran, seconds per step, and where the plan's step was off.

    `outside` is what a step takes before its first action and after its last.
    """

    runners: Mapping[str, Runner]
    seconds: Mapping[str, list[float]]
    lower_bound: float
    links: str
    outside: float
    difference: Difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this case")
    options = parser.parse_args()
    repeats = 8 if options.quick else 36
    chosen = CASES if options.case is None else (CASES[options.case],)
    sections = ["Two gloo processes with one thread each; the steps of all schedules took turns."]
    for case in chosen:
        outcome = run_on_ranks(partial(_run_case, case, repeats), RANKS, seconds=LIMIT_SECONDS)[0]
        sections.append(_describe(case, outcome))
    if options.quick or options.case is not None:
        print("\n\n".join(sections))
        return
    spread = f"medians of {repeats} steps, ± the interquartile range as a share of the median"
    print(write_result("planned_step", "Beside real steps", sections, spread=spread))


def _describe(case: Case, found: Outcome) -> str:
    measured = {name: statistics.median(times) for name, times in found.seconds.items()}
    planned = measured["planned again"]
    lines = [
        f"## {case.name}: {len(case.layers())} layers, {case.microbatches} microbatches",
        "",
        "| schedule | layers per stage | peak MiB | predicted ms | measured ms | spread "
        "| measured / predicted | measured / planned again |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, seconds in measured.items():
        one = found.runners[name]
        spread = spread_of(np.array(found.seconds[name]))
        lines.append(
            f"| {name} | {' '.join(map(str, one.sizes))} | {one.peak_bytes / 2**20:.1f} "
            f"| {1e3 * one.predicted:.1f} | {1e3 * seconds:.1f} | ±{spread:.0%} "
            f"| {seconds / one.predicted:.2f} | {seconds / planned:.2f} |"
        )
    lines.append("")
    for way in ("even", "balanced"):
        rivals = {name: measured[name] for name in measured if name.endswith(f", {way}")}
        best = min(rivals, key=lambda name: rivals[name])
        ratio = rivals[best] / planned
        lines.append(f"The best family with {way} cuts, {best}, is {ratio:.2f} of the plan.")
    lines += [
        "",
        f"Planned from recorded steps, no schedule with this cut and memory is faster than "
        f"{1e3 * found.lower_bound:.1f} ms. {found.links} A step takes "
        f"{1e3 * found.outside:.1f} ms before its first action and after its last.",
        "",
        "```text",
        str(found.difference),
        "```",
    ]
    return "\n".join(lines)


def _run_case(case: Case, repeats: int, _report: Report) -> Outcome:
    layers = case.layers()
    x, y = case.batch(ROWS * case.microbatches)
    pieces, links = _shared(_measure(case, layers))

    def pipeline(one: Runner | Plan, sizes: Sequence[int]) -> ps.Pipeline:
        order = one.schedule if isinstance(one, Runner) else one
        options = RunOptions(around=_slow_down(case.factors[dist.get_rank()]))
        stages = _cut(layers, sizes)
        group = dist.group.WORLD
        return ps.Pipeline(stages, order, loss=case.loss, group=group, options=options)

    memory, rivals = _rivals(case, pieces, links)
    plan = _shared(_search(case, pieces, links, memory))
    assert plan.choices is not None, "a search makes choices"
    sizes = plan.choices.sizes
    runners = {"planned": _runner(plan, sizes)}
    pipelines = {"planned": pipeline(plan, sizes)}
    recorded = _record(pipelines["planned"], x, y)
    again = _shared(revise(plan, *recorded, seconds=5.0).new if dist.get_rank() == 0 else None)
    runners["planned again"] = _runner(again, sizes)
    pipelines["planned again"] = pipeline(again, sizes)
    same_cut = dict(_families(again.problem.costs, sizes, case.microbatches, "the plan's cut"))
    fastest = min(same_cut, key=lambda name: same_cut[name].predicted)
    for name, one in (rivals | {fastest: same_cut[fastest]}).items():
        runners[name] = one
        pipelines[name] = pipeline(one, one.sizes)
    calls = {name: partial(pipe.step, x, target=y) for name, pipe in pipelines.items()}
    seconds = take_turns(repeats, calls)
    recorded = _record(pipelines["planned again"], x, y)
    middle = sorted(recorded, key=lambda one: one.end_time)[len(recorded) // 2]
    return Outcome(
        runners=runners,
        seconds=seconds,
        lower_bound=again.lower_bound,
        links=f"Host seconds per message: {1e6 * links.host_message:.0f} us; round trips "
        f"varied by {max(links.spread.values()):.0%}.",
        outside=_outside(pipelines["planned again"], x, y),
        difference=review(again.timeline, middle).difference,
    )


def _measure(case: Case, layers: Sequence[nn.Module]) -> tuple[list[Piece], Links]:
    """Measure layers and links; both ranks measure at once, as both will work at once."""
    row, target = case.batch(ROWS)
    found = measure_closely(layers, example=(row,), loss=case.loss, target=target, repeats=15)
    names = [field.name for field in fields(Piece) if field.name not in ("name", "host_action")]
    columns = {name: found.costs.per_stage(name, len(layers)) for name in names}
    host = found.costs.host_action
    pieces = [
        Piece(f"{number}", **{n: float(c[number]) for n, c in columns.items()}, host_action=host)
        for number in range(len(layers))
    ]
    assert dist.group.WORLD is not None, "there is a group"
    return pieces, measure_links(dist.group.WORLD)


def _search(case: Case, pieces: Sequence[Piece], links: Links, memory: float) -> Plan | None:
    """Rank 0 searches; the others get what it found. Plans that recompute are left out.

    Of plans that are nearly as fast, the one with the fewest stages runs: it has fewer messages.
    """
    if dist.get_rank() != 0:
        return None
    largest = max(piece.message_bytes for piece in pieces)
    found = search(
        pieces,
        ranks=RANKS,
        batch=case.microbatches,
        memory=memory,
        transfer=links.transfer(largest),
        host_message=links.host_message,
        rank_factors=case.factors,
        seconds=SEARCH_SECONDS,
    )
    plans = [one.plan for one in found.found if not one.choices.checkpointed]
    close = [plan for plan in plans if plan.seconds <= CLOSE * plans[0].seconds]
    return min(close, key=lambda plan: plan.problem.stages)


def _rivals(case: Case, pieces: Sequence[Piece], links: Links) -> tuple[float, dict[str, Runner]]:
    """Return the limit, and the families that are predicted to be fastest for each way to cut."""
    found = {way: dict(_all_rivals(case, pieces, links, way)) for way in ("even", "balanced")}
    memory = ROOM * min(found["even"].values(), key=_predicted).peak_bytes
    kept: dict[str, Runner] = {}
    for rivals in found.values():
        fitting = {name: one for name, one in rivals.items() if one.peak_bytes <= memory}
        fastest = sorted(fitting, key=lambda name: fitting[name].predicted)[:MOST_RIVALS]
        kept |= {name: fitting[name] for name in fastest}
    return memory, kept


def _all_rivals(
    case: Case, pieces: Sequence[Piece], links: Links, way: str
) -> Iterator[tuple[str, Runner]]:
    """Yield every family that the model can run with, cut in one of the two ways."""
    for per_rank in (1, 2):
        for placement in (ps.Placement.loop(RANKS, per_rank), ps.Placement.v(RANKS)):
            if placement.num_stages != RANKS * per_rank:
                continue
            balanced = partition(pieces, placement)
            sizes = balanced.sizes if way == "balanced" else _even(len(pieces), placement)
            cut = replace(balanced, cuts=(0, *accumulate(sizes)))
            costs = links.add_to(_slower(cut, case.factors))
            yield from _families(costs, sizes, case.microbatches, way, placement)


def _predicted(one: Runner) -> float:
    return one.predicted


def _even(count: int, placement: ps.Placement) -> tuple[int, ...]:
    """Return the same number of layers for each stage; the first ones take what is left over."""
    each, more = divmod(count, placement.num_stages)
    return tuple(each + (stage < more) for stage in range(placement.num_stages))


def _slower(cut: Partition, factors: Sequence[float]) -> ps.Costs:
    """Return what stages cost on ranks of different speed."""
    costs, stages = cut.to_costs(), cut.placement.num_stages
    each = np.array(factors)[list(cut.placement.rank_of_stage)]
    seconds = {
        name: (each * costs.per_stage(name, stages)).tolist()
        for name in ("forward", "backward_input", "backward_weight")
    }
    return replace(costs, **seconds)


def _families(
    costs: ps.Costs,
    sizes: Sequence[int],
    microbatches: int,
    way: str,
    placement: ps.Placement | None = None,
) -> Iterator[tuple[str, Runner]]:
    """Yield the fixed families with one copy of the model that exist for a cut."""
    stages = len(sizes)
    for name in FAMILIES:
        try:
            schedule = ps.build(
                name, ranks=RANKS, microbatches=microbatches, stages_per_rank=stages // RANKS
            )
        except PenstockError:
            continue
        is_chain = schedule.dataflow == ps.Dataflow.chain(stages)
        if not is_chain or schedule.is_forward_only or schedule.num_stages != stages:
            continue
        if placement is None or schedule.placement == placement:
            timeline = ps.simulate(schedule, costs)
            found = Runner(tuple(sizes), schedule, timeline.end_time, timeline.peak_bytes)
            yield f"{name}, {way}", found


def _runner(plan: Plan, sizes: tuple[int, ...]) -> Runner:
    return Runner(sizes, plan.schedule, plan.seconds, plan.timeline.peak_bytes)


def _cut(layers: Sequence[nn.Module], sizes: Sequence[int]) -> list[nn.Module]:
    ends = (0, *accumulate(sizes))
    return [nn.Sequential(*layers[begin:end]) for begin, end in pairwise(ends)]


def _slow_down(factor: float) -> dict[Kind, Callable[[Action, Callable[[], None]], None]]:
    """Return what makes every compute action of this rank take `factor` times as long."""

    def run_slowly(_action: Action, run: Callable[[], None]) -> None:
        begin = perf_counter()
        run()
        end = begin + factor * (perf_counter() - begin)
        while perf_counter() < end:
            pass

    return {} if factor == 1 else dict.fromkeys(COMPUTE, run_slowly)


def _outside(pipe: ps.Pipeline, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the median seconds of a recorded step that no rank is in its schedule."""
    outside = []
    for _ in range(RECORDED_STEPS):
        dist.barrier()
        begin = perf_counter()
        timeline = pipe.step(x, target=y, record=True).timeline
        if timeline is not None:
            outside.append(perf_counter() - begin - timeline.end_time)
    return statistics.median(outside)


def _record(pipe: ps.Pipeline, x: torch.Tensor, y: torch.Tensor) -> list[ps.Timeline]:
    results = [pipe.step(x, target=y, record=True) for _ in range(RECORDED_STEPS + 1)]
    return [result.timeline for result in results[1:] if result.timeline is not None]


def _shared(value: Any) -> Any:
    """Return what rank 0 has."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def take_turns(repeats: int, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of each call, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(repeats + 1):
        # Who comes first changes from round to round.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            begin = perf_counter()
            calls[name]()
            times[name].append(perf_counter() - begin)
    return {name: column[1:] for name, column in times.items()}


if __name__ == "__main__":
    main()
