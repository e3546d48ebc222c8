"""Schedules of cases: every family that trains, and orders that nobody designed."""

import re
from dataclasses import replace
from random import Random

import penstock as ps
from penstock.ir.actions import Action, Kind
from penstock.ir.dataflow import Dataflow
from penstock.passes import add_offload, add_recompute
from penstock.schedules.registry import FAMILIES
from tests.differential.case import Case, Order
from tests.strategies import join_at

__all__ = [
    "TRAINING_FAMILIES",
    "build_schedule",
    "draw_additions",
    "draw_order",
    "forward_orders",
    "num_parts",
]

# As they are before any test registers one of its own.
TRAINING_FAMILIES = tuple(name for name in FAMILIES if name != "ForwardOnly")
_FREE_PER_RANK = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
_MOST_MICROBATCHES = 5
_MOST_STAGES = 6
_STAGE = re.compile(r"(\d+)[FBIW]")


def draw_order(chance: Random, ranks: int) -> Order:
    """A schedule of any family for a chain, or any order at all."""
    microbatches = chance.randint(1, _MOST_MICROBATCHES)
    if chance.random() < 0.25:
        return _draw_actions(chance, ranks, microbatches)
    families = [name for name in TRAINING_FAMILIES if name != "DualPipe" or ranks % 2 == 0]
    family = chance.choice(families)
    per_rank = FAMILIES[family].stages_per_rank
    if family in _FREE_PER_RANK:
        per_rank = chance.randint(1, max(1, _MOST_STAGES // ranks))
    return Order(family, ranks, per_rank, max(microbatches, FAMILIES[family].copies))


def num_parts(order: Order) -> int:
    """How many parts of a model an order runs."""
    if order.actions:
        # Actions begin with their stage: 2F0.
        return 1 + max(int(stage) for row in order.actions for stage in _STAGE.findall(row))
    return order.ranks * order.per_rank // FAMILIES[order.family].copies


def draw_additions(chance: Random, case: Case) -> Order:
    """The order of a case with actions for memory, with overlapped neighbours, or with both."""
    schedule = build_schedule(case)
    pairs = [(s, m) for s in range(schedule.num_stages) for m in range(schedule.microbatches)]
    # Each copy of a model that runs in both directions has microbatches of its own.
    pairs = [pair for pair in pairs if _runs(schedule, *pair)]
    kinds = [chance.choice(["kept", "kept", "recomputed", "offloaded"]) for _ in pairs]
    rows = range(1, len(schedule.rows))
    return replace(
        case.order,
        recomputed=tuple(p for p, kind in zip(pairs, kinds, strict=True) if kind == "recomputed"),
        offloaded=tuple(p for p, kind in zip(pairs, kinds, strict=True) if kind == "offloaded"),
        joined=tuple(row for row in rows if chance.random() < 0.3),
    )


def _runs(schedule: ps.Schedule, stage: int, microbatch: int) -> bool:
    rows = schedule.rows
    return bool(((rows.stage == stage) & (rows.microbatch == microbatch)).any())


def build_schedule(case: Case) -> ps.Schedule:
    """The schedule of a case, with the skips of its model and what was added to its order."""
    schedule, order = _build_plain(case), case.order
    for row in order.joined:
        schedule = join_at(schedule, row)
    schedule = add_recompute(schedule, order.recomputed)
    return add_offload(schedule, order.offloaded, behind=order.microbatches % 2, ahead=0)


def _build_plain(case: Case) -> ps.Schedule:
    order = case.order
    flow = Dataflow(len(case.parts), case.edges)
    if order.actions:
        return ps.Schedule.from_orders([row.split() for row in order.actions], dataflow=flow)
    schedule = ps.build(
        order.family,
        ranks=order.ranks,
        microbatches=order.microbatches,
        stages_per_rank=order.per_rank,
    )
    return schedule if flow.is_chain else ps.passes.reroute(schedule, flow)


def forward_orders(schedule: ps.Schedule) -> set[tuple[int, ...]]:
    """In which orders stages run their forwards."""
    rows = schedule.rows
    return {
        tuple(rows.microbatch[(rows.kind == Kind.FORWARD) & (rows.stage == stage)].tolist())
        for stage in range(schedule.num_stages)
    }


def _draw_actions(chance: Random, ranks: int, microbatches: int) -> Order:
    """Stages anywhere, and at every moment any rank does any work that is ready."""
    stages = chance.randint(ranks, max(ranks, _MOST_STAGES - 1))
    holder = [*range(ranks), *(chance.randrange(ranks) for _ in range(stages - ranks))]
    chance.shuffle(holder)
    is_split = [chance.random() < 0.6 for _ in range(stages)]
    needs = {
        action: _needs(action, stages, is_split)
        for stage in range(stages)
        for microbatch in range(microbatches)
        for kind in _kinds(is_split[stage])
        for action in [Action(kind, stage, microbatch)]
    }
    orders: list[list[str]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while needs:
        action = chance.choice([action for action, before in needs.items() if before <= done])
        del needs[action]
        orders[holder[action.stage]].append(str(action))
        done.add(action)
    return Order("random", ranks, 1, microbatches, tuple(" ".join(order) for order in orders))


def _kinds(is_split: bool) -> tuple[Kind, ...]:
    if is_split:
        return Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    return Kind.FORWARD, Kind.FULL_BACKWARD


def _needs(action: Action, stages: int, is_split: list[bool]) -> set[Action]:
    """What comes before an action in a chain, which is enough for any skips."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD:
            return {Action(Kind.FORWARD, stage - 1, microbatch)} if stage else set()
        case Kind.BACKWARD_WEIGHT:
            return {Action(Kind.BACKWARD_INPUT, stage, microbatch)}
        case _:
            later = range(stage + 1, min(stage + 2, stages))
            before = {Action(_kinds(is_split[s])[1], s, microbatch) for s in later}
            return {Action(Kind.FORWARD, stage, microbatch), *before}
