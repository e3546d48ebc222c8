"""The planning of the demo: measure the model, and find the best order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.cli.reports import title
from penstock.cli.waiting.busy import show_busy
from penstock.planner.search.layouts import describe_placement
from penstock.units import format_bytes, format_share

if TYPE_CHECKING:
    from penstock.costs import Costs
    from penstock.tools.demo.candidates import DemoCandidate, PlannedCandidate
    from penstock.tools.demo.task import Task

__all__ = ["Preparation", "describe_choice", "prepare"]

_BASELINES = ("1F1B", "GPipe")
_SECONDS_PER_PLAN = 2.0
# A margin, since measured bytes are a few per cent off.
_MARGIN = 0.05
# Measured on a quiet machine, times of the same work vary by less.
_QUIET_SPREAD = 0.3
_KINDS = {
    "F": "forward",
    "I": "backward_input",
    "W": "backward_weight",
    "B": "full_backward",
}
_KEPT = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")


@dataclass(frozen=True)
class Preparation:
    """The costs of the pieces, the plan, its memory limit per rank, and the baselines.

    Predictions may reach `planned_limit`, which is the limit less a margin, because measured bytes
    are a few per cent off. The baselines are well-known families, and the one that is predicted
    to be best within that.
    """

    costs: Costs
    planned: PlannedCandidate
    memory: float
    planned_limit: float
    baselines: tuple[DemoCandidate, ...]


def prepare(console: Console, task: Task) -> Preparation:
    """Measure the model, choose a memory limit, and plan for it."""
    costs = _measure(console, task)
    return _plan(console, task, costs)


def _measure(console: Console, task: Task) -> Costs:
    from penstock.tools.demo.measuring import measure_task

    where = "a GPU" if task.device == "cuda" else "the processor"
    title(console, f"Measure: the costs of a small GPT on {where}, with {task.ranks} ranks")
    with show_busy(console, "starting processes, running microbatches"):
        found = measure_task(task)
    console.print(_cost_table(task, found.costs))
    console.print(
        f"milliseconds of one microbatch, with a typical spread of {format_share(found.spread)}; "
        "F is the forward, I and W the backward for inputs and weights, B both at once; constant "
        "bytes are parameters, gradients and optimizer, those of a microbatch its activations"
    )
    if found.spread > _QUIET_SPREAD:
        console.print(
            "other work keeps this machine busy, so predictions are rough and times vary"
        )
    return found.costs


def _cost_table(task: Task, costs: Costs) -> Table:
    """List the first piece, the mean of the layers, which are alike, and the last piece."""
    table = Table(box=None, pad_edge=False)
    table.add_column("piece")
    for heading in (*(f"{kind} ms" for kind in _KINDS), "constant", "per microbatch"):
        table.add_column(heading, justify="right")
    count = len(task.pieces)
    held = np.sum([costs.per_stage(name, count) for name in _KEPT], axis=0)
    columns = [1e3 * costs.per_stage(name, count) for name in _KINDS.values()]
    activations = costs.per_stage("activation_bytes", count)
    rows = {
        task.pieces[0]: slice(0, 1),
        f"{task.layers} layers, each": slice(1, -1),
        task.pieces[-1]: slice(-1, None),
    }
    for name, part in rows.items():
        table.add_row(
            name,
            *(f"{column[part].mean():.2f}" for column in columns),
            format_bytes(held[part].mean()),
            format_bytes(activations[part].mean()),
        )
    return table


def _plan(console: Console, task: Task, costs: Costs) -> Preparation:
    from penstock.tools.demo.candidates import (
        best_family,
        family_candidate,
        plan_candidate,
        plan_candidates,
    )

    title(console, f"Plan: the fastest order for {task.ranks} ranks under a memory limit")
    baselines = tuple(family_candidate(name, task, costs) for name in _BASELINES)
    needed = baselines[0].predicted.peak_bytes
    limit = needed * (1 + _MARGIN)
    with show_busy(console, "solving"):
        found = plan_candidates(task, costs, memory=needed, seconds=_SECONDS_PER_PLAN)
        best = found[0]
        free = plan_candidate(
            task,
            costs,
            best.plan.problem.placement,
            memory=None,
            seconds=_SECONDS_PER_PLAN,
        )
    console.print(
        f"memory limit: {format_bytes(limit)} per rank; predictions may reach "
        f"{format_bytes(needed)}, as that of {_BASELINES[0]} does, because real bytes are a few "
        "per cent off"
    )
    console.print(_plan_table(found))
    console.print(
        "end time: from the first start to the end of the last rank; bubble: the idle share of "
        "all ranks in it; peak: bytes of the fullest rank; above the bound: how much slower than "
        "the best order of these cuts it is at most"
    )
    console.print(describe_choice(found))
    console.print(_describe_limit(limit, best, free, baselines[1]))
    rival = best_family(task, costs, memory=needed)
    if rival is not None and rival.name not in _BASELINES:
        baselines = (rival, *baselines)
    return Preparation(costs, best, limit, needed, baselines)


def _plan_table(found: list[PlannedCandidate]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("placement")
    table.add_column("pieces per stage")
    for heading in ("end time ms", "bubble", "peak", "above the bound"):
        table.add_column(heading, justify="right")
    for one in found:
        timeline = one.plan.timeline
        table.add_row(
            describe_placement(one.plan.problem.placement),
            " ".join(map(str, one.sizes)),
            f"{1e3 * one.plan.seconds:.1f}",
            format_share(timeline.bubble_rate),
            format_bytes(timeline.peak_bytes),
            format_share(one.plan.gap),
        )
    return table


def describe_choice(found: list[PlannedCandidate]) -> str:
    """Say which of the plans is taken, by which rule, and how good it is."""
    from penstock.tools.demo.candidates import MESSAGE_HANDICAP

    best, gap = found[0], found[0].plan.gap
    fastest = min(found, key=lambda one: one.plan.seconds)
    rule = ""
    if fastest is not best:
        placement = describe_placement(fastest.plan.problem.placement)
        rule = (
            f", although {placement} is predicted to be faster: it sends twice as many messages, "
            "which cost the host time that these costs leave out, so it must be faster by "
            f"{MESSAGE_HANDICAP - 1:.0%}"
        )
    # Printed as 0.0 %.
    if gap < 0.0005:
        return f"the first is the plan{rule}; it is proven that no order of this cut is faster"
    return (
        f"the first is the plan{rule}; no order of this cut is faster by more than "
        f"{format_share(gap)}"
    )


def _describe_limit(
    limit: float, best: PlannedCandidate, free: PlannedCandidate, wasteful: DemoCandidate
) -> str:
    """Say what the limit costs, and which baseline exceeds it."""
    free_bytes = free.plan.timeline.peak_bytes
    saved = 1 - free.plan.seconds / best.plan.seconds
    if free_bytes > limit:
        effect = f"without it, a plan would save {format_share(max(saved, 0.0))} of a step"
        effect += f" and need {format_bytes(free_bytes)}"
    else:
        effect = "a plan without it is not faster"
    needed = wasteful.predicted.peak_bytes
    fits = "needs" if needed > limit else "fits too, with"
    return f"effect of the limit: {effect}; {wasteful.name} {fits} {format_bytes(needed)}"
