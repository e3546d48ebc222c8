"""Plans that run: uneven models on two gloo processes, predicted beside measured.

    python benchmarks/planned_step.py            about five minutes, on a machine that is quiet
    python benchmarks/planned_step.py --quick    fewer repeats

For each model: costs are measured and read off recorded steps of the best fixed family, a schedule
is solved for them at the memory of that family, and steps of the plan and of the families take
turns. Families for two stages, one per rank, run the same model cut more coarsely. On a machine
that has other things to do, only its quick steps are informative: of recorded steps the fastest
fifth counts, and of timed steps the time that a fifth of them keeps; medians are shown beside it.
Prints its tables and writes them to benchmarks/results/planned_step.md.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import PenstockError
from penstock.measuring.links import measure_links
from penstock.measuring.stages import measure
from penstock.planner.order.solver import solve
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.schedules.registry import FAMILIES
from penstock.sim.costs_of_timeline import costs_of
from penstock.sim.review import Review, review
from penstock.tools.launcher import Report, run_on_ranks

RESULTS = Path(__file__).parent / "results" / "planned_step.md"
LIMIT_SECONDS = 900
ROWS, WIDTH, VOCABULARY = 64, 384, 3072
RECORDED_STEPS = 25
QUICK_SHARE = 0.2
COARSE = ("1F1B", "ZB-H1", "ZB-H2")
SOLVE_SECONDS = 5.0


@dataclass(frozen=True)
class Case:
    """A model by how many layers each of its stages has, and how it is run.

    With `has_head` the last stage ends in a layer as wide as a vocabulary, and a loss over it.
    """

    name: str
    layers: tuple[int, ...]
    has_head: bool
    placement: ps.Placement
    microbatches: int


CASES = (
    Case("heavy first and last stage, loop", (16, 4, 4, 8), True, ps.Placement.loop(2, 2), 4),
    Case("the same with more microbatches", (16, 4, 4, 8), True, ps.Placement.loop(2, 2), 8),
    Case("heavy second and last stage, V", (4, 12, 4, 12), False, ps.Placement.v(2), 4),
)


@dataclass(frozen=True)
class Outcome:
    """What one case gave: seconds per step by name, predictions, and where they were off."""

    seconds: dict[str, list[float]]
    predicted: dict[str, float]
    first_guess: float
    peak_bytes: dict[str, float]
    lower_bound: float
    review: Review
    replanned: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    repeats = 10 if parser.parse_args().quick else 40
    sections = [
        f"torch {torch.__version__}, {os.cpu_count()} cores, two gloo processes with one thread "
        f"each. Measured is what the quickest {QUICK_SHARE:.0%} of {repeats} steps keep; the "
        "steps of all schedules took turns."
    ]
    for case in CASES:
        work = partial(_run_case, case, repeats)
        outcome = run_on_ranks(work, 2, seconds=LIMIT_SECONDS)[0]
        sections.append(_describe(case, outcome))
    text = "\n\n".join(sections) + "\n"
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text, encoding="utf-8")


def _describe(case: Case, found: Outcome) -> str:
    planned = quick(found.seconds["planned"])
    lines = [
        f"## {case.name}: stages of {' '.join(map(str, case.layers))} layers"
        f"{' and a head' if case.has_head else ''}, {case.microbatches} microbatches",
        "",
        "| schedule | peak MiB of a rank | predicted s | measured s | predicted / measured "
        "| measured / planned | median s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, times in found.seconds.items():
        predicted, seconds = found.predicted[name], quick(times)
        lines.append(
            f"| {name} | {found.peak_bytes[name] / 2**20:.1f} | {predicted:.3f} | {seconds:.3f} "
            f"| {predicted / seconds:.2f} | {seconds / planned:.2f} "
            f"| {statistics.median(times):.3f} |"
        )
    lines += [
        "",
        f"Predicted from `measure` and `measure_links` alone, before any step: "
        f"{found.first_guess:.3f} s. Proven bound of any schedule at this memory: "
        f"{found.lower_bound:.3f} s. Planned anew from the recorded steps of the plan: "
        f"{found.replanned:.3f} s.",
        "",
        "```text",
        str(found.review),
        "```",
    ]
    return "\n".join(lines)


def make_stages(case: Case) -> list[nn.Module]:
    torch.manual_seed(0)
    stages: list[nn.Module] = []
    for count in case.layers:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count)]
        stages.append(nn.Sequential(*layers))
    if case.has_head:
        stages[-1] = nn.Sequential(stages[-1], nn.Linear(WIDTH, VOCABULARY))
    return stages


def make_batch(case: Case, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    if case.has_head:
        return torch.randn(rows, WIDTH), torch.randint(VOCABULARY, (rows,))
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def _run_case(case: Case, repeats: int, _report: Report) -> Outcome:
    stages = make_stages(case)
    loss: Callable[..., torch.Tensor] = nn.CrossEntropyLoss() if case.has_head else nn.MSELoss()
    x, y = make_batch(case, ROWS * case.microbatches)

    def pipeline(schedule: ps.Schedule | Plan) -> ps.Pipeline:
        order = schedule.schedule if isinstance(schedule, Plan) else schedule
        modules = stages if order.num_stages == len(stages) else _join(stages, order.num_stages)
        return ps.Pipeline(modules, schedule, loss=loss, group=dist.group.WORLD)

    def record(pipe: ps.Pipeline) -> list[ps.Timeline]:
        results = [pipe.step(x, target=y, record=True) for _ in range(RECORDED_STEPS + 1)]
        found = [result.timeline for result in results[1:] if result.timeline is not None]
        found.sort(key=lambda timeline: timeline.end_time)
        return found[: int(QUICK_SHARE * RECORDED_STEPS)]

    guess = _shared(_guess(case, stages, loss))
    families = _families(case.placement, case.microbatches)
    learned = {
        name: costs_of(*record(pipeline(schedule)), like=guess)
        for name, schedule in families.items()
    }
    memory, costs = _best_family(families, learned)
    plan = _shared(_solve(case, costs, memory))
    coarse = _families(ps.Placement.loop(2), case.microbatches)
    rivals = families | {f"{name}, two stages": coarse[name] for name in COARSE}
    predictions = {"planned": plan.timeline} | {
        name: ps.simulate(schedule, costs.recut(2, schedule.num_stages))
        for name, schedule in rivals.items()
    }
    pipelines = {"planned": pipeline(plan)} | {
        name: pipeline(schedule)
        for name, schedule in rivals.items()
        if predictions[name].peak_bytes <= memory
    }
    calls = {name: partial(pipe.step, x, target=y) for name, pipe in pipelines.items()}
    seconds = take_turns(repeats, calls)
    timelines = record(pipelines["planned"])
    again = costs_of(*timelines, like=costs)
    return Outcome(
        seconds=seconds,
        predicted={name: predictions[name].end_time for name in pipelines},
        first_guess=ps.simulate(plan.schedule, guess).end_time,
        peak_bytes={name: predictions[name].peak_bytes for name in pipelines},
        lower_bound=plan.lower_bound,
        review=review(plan.timeline, timelines[len(timelines) // 2]),
        replanned=_shared(_solve(case, again, memory)).timeline.end_time,
    )


def _join(stages: list[nn.Module], count: int) -> list[nn.Module]:
    """The same model in fewer stages."""
    size = len(stages) // count
    return [nn.Sequential(*stages[size * i : size * (i + 1)]) for i in range(count)]


def _guess(case: Case, stages: list[nn.Module], loss: Callable[..., torch.Tensor]) -> ps.Costs:
    """Costs before any step: both ranks measure at once, as both will work at once."""
    row, target = make_batch(case, ROWS)
    costs = measure(stages, example=(row,), loss=loss, target=target, repeats=9)
    assert dist.group.WORLD is not None, "there is a group"
    links = measure_links(dist.group.WORLD)
    return replace(
        costs, transfer=links.transfer(float(costs.per_stage("message_bytes", 4).max()))
    )


def _families(placement: ps.Placement, microbatches: int) -> dict[str, ps.Schedule]:
    """The fixed families that exist for a placement, with one copy of the model."""
    found = {}
    ranks, stages = placement.num_ranks, placement.num_stages
    for name in FAMILIES:
        try:
            schedule = ps.build(
                name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages // ranks
            )
        except PenstockError:
            continue
        is_chain = schedule.dataflow == ps.Dataflow.chain(stages)
        if schedule.placement == placement and is_chain and not schedule.is_forward_only:
            found[name] = schedule
    return found


def _best_family(
    families: dict[str, ps.Schedule], learned: dict[str, ps.Costs]
) -> tuple[float, ps.Costs]:
    """The memory of the family that is predicted to be fastest, and what its steps cost."""
    timelines = {name: ps.simulate(families[name], learned[name]) for name in families}
    best = min(timelines, key=lambda name: timelines[name].end_time)
    return timelines[best].peak_bytes, learned[best]


def _solve(case: Case, costs: ps.Costs, memory: float) -> Plan | None:
    """Rank 0 solves; the others get what it found."""
    if dist.get_rank() != 0:
        return None
    problem = SchedulingProblem.of(costs, case.placement, case.microbatches, memory)
    return solve(problem, seconds=SOLVE_SECONDS)


def _shared(value: Any) -> Any:
    """What rank 0 has."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def quick(times: list[float]) -> float:
    """The seconds that the quickest of these keep."""
    return sorted(times)[int(QUICK_SHARE * len(times))]


def take_turns(repeats: int, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """The seconds of each call, after a round that does not count."""
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
