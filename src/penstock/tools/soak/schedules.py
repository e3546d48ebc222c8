"""Random schedules: families, random orders and plans."""

from random import Random

from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.actions import Action, Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.passes.reroute import reroute
from penstock.planner.planning import plan
from penstock.schedules.registry import FAMILIES

__all__ = ["draw_schedule"]

_MOST_MICROBATCHES = 16
_MOST_STAGES_PER_RANK = 3
# Planning without a time limit is the same in every run, unless it uses a solver.
_FEWEST_PLANNED = 9


def draw_schedule(chance: Random, most_ranks: int) -> Schedule:
    """Draw a valid schedule on up to `most_ranks` ranks; half of the models have skips.

    >>> draw_schedule(Random(1), 4) == draw_schedule(Random(1), 4)
    True
    """
    ranks = chance.randint(1, most_ranks)
    make = chance.choices([_draw_family, _draw_order, _draw_plan], [5, 4, 1])[0]
    schedule = make(chance, ranks)
    parts = schedule.dataflow.num_parts
    return reroute(schedule, _draw_dataflow(chance, parts)) if make != _draw_order else schedule


def _draw_family(chance: Random, ranks: int) -> Schedule:
    # Two directions need pairs of ranks, and work for both.
    family = chance.choice([f for f in FAMILIES.values() if f.copies == 1 or ranks % 2 == 0])
    microbatches = chance.randint(family.copies, _MOST_MICROBATCHES)
    stages_per_rank = None
    if family.name in ("ForwardOnly", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"):
        stages_per_rank = chance.randint(1, _MOST_STAGES_PER_RANK)
    return build(
        family.name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
    )


def _draw_plan(chance: Random, ranks: int) -> Schedule:
    costs = Costs(
        forward=chance.uniform(0.5, 2),
        backward_input=chance.uniform(0.5, 2),
        backward_weight=chance.uniform(0.5, 2),
        transfer=chance.uniform(0, 0.5),
    )
    microbatches = chance.randint(_FEWEST_PLANNED, _MOST_MICROBATCHES)
    return plan(costs, ranks=ranks, microbatches=microbatches, seconds=0.0).schedule


def _draw_order(chance: Random, ranks: int) -> Schedule:
    """Draw a placement and an order: at every moment any rank does any work that is ready."""
    stages = ranks * chance.randint(1, _MOST_STAGES_PER_RANK)
    holder = [*range(ranks), *(chance.randrange(ranks) for _ in range(stages - ranks))]
    chance.shuffle(holder)
    flow = _draw_dataflow(chance, stages)
    is_split = [chance.random() < 0.5 for _ in range(stages)]
    microbatches = range(chance.randint(1, _MOST_MICROBATCHES))
    actions = [
        Action(kind, stage, microbatch)
        for stage in range(stages)
        for microbatch in microbatches
        for kind in _kinds(is_split[stage])
    ]
    needs = {action: _needs(action, flow, is_split) for action in actions}
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while needs:
        action = chance.choice([action for action, before in needs.items() if before <= done])
        del needs[action]
        orders[holder[action.stage]].append(action)
        done.add(action)
    return Schedule.from_orders(orders, name="random", dataflow=flow)


def _kinds(is_split: bool) -> tuple[Kind, ...]:
    if is_split:
        return Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    return Kind.FORWARD, Kind.FULL_BACKWARD


def _needs(action: Action, flow: Dataflow, is_split: list[bool]) -> set[Action]:
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD:
            return {Action(Kind.FORWARD, p, microbatch) for p in flow.producers(stage)}
        case Kind.BACKWARD_WEIGHT:
            return {Action(Kind.BACKWARD_INPUT, stage, microbatch)}
        case _:
            own = Action(Kind.FORWARD, stage, microbatch)
            consumers = flow.consumers(stage)
            return {own, *(Action(_kinds(is_split[c])[1], c, microbatch) for c in consumers)}


def _draw_dataflow(chance: Random, parts: int) -> Dataflow:
    """Draw a chain, which has a few skips half of the time."""
    skips = [(p, c) for p in range(parts) for c in range(p + 2, parts)]
    kept = chance.sample(skips, min(len(skips), chance.choice([0, 0, 1, 3])))
    return Dataflow(parts, [*Dataflow.chain(parts).edges, *kept])
