"""The orders of torch's schedule classes, per rank, with the idle slots that torch lists.

What is done, and in which order, comes from `penstock.schedules`; here it gets its idle slots:

    Interleaved1F1B    rank 0   0F0 0F1 2F0 2F1  .   .   .  2B0  .  2B1  .  0B0  .  0B1
                       rank 1    .  1F0 1F1  .  3F0 3B0 3F1 3B1  .  1B0  .  1B1
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from penstock.assembly import build
from penstock.dropin.names.actions import _Action
from penstock.dropin.names.lists import (
    AnyOrder,
    Order,
    Slots,
    read_stage_ranks,
    to_actions,
    to_schedule,
)
from penstock.dropin.orders.slots import fill_slots, run_slots
from penstock.errors import SizeError
from penstock.ir.actions import Kind
from penstock.ir.graph import Graph, build_graph
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.schedules.moves import Moves, alternate, count_microbatches, join
from penstock.schedules.registry import find_family
from penstock.schedules.zero_bubble import weave

__all__ = ["_get_1f1b_rank_ops", "_get_warmup_ops", "add_bubbles", "build_order", "order_of_rank"]


def order_of_rank(
    name: str, rank: int, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Slots:
    """Return one rank's order; that of InterleavedZeroBubble before `add_bubbles` sees others'."""
    family = find_family(name)
    per_rank = family.stages_per_rank if stages_per_rank is None else stages_per_rank
    hops = ranks - 1 - rank
    # With few microbatches, a V is idle where a full one has work.
    full = max(2 * ranks - 1, microbatches) if family.name == "ZBV" else microbatches
    schedule = _schedule(family.name, ranks, full, per_rank)
    actions = list(to_actions(schedule.rows, rank))
    match family.name:
        case "GPipe" | "1F1B":
            return list(to_actions(add_reduce_grad(schedule).rows, rank))
        case "LoopedBFS":
            turn = len(actions) // 2
            return _insert_idle(actions, rank, ahead=turn, wait=2 * hops)
        case "Interleaved1F1B":
            ahead = _count_ahead(rank, ranks, microbatches, per_rank, 2)
            wait = _wait_for_backward(rank, ranks, per_rank, ahead)
            return _insert_idle(actions, rank, ahead=ahead, wait=wait, drain=ahead)
        case "InterleavedZeroBubble":
            ahead = _count_ahead(rank, ranks, microbatches, per_rank, 1)
            return _insert_idle(actions, rank, ahead=ahead, wait=hops)
        case "ZBV":
            kept = (a if (a.microbatch_index or 0) < microbatches else None for a in actions)
            return [None] * rank + list(kept)
        case "DualPipeV" if microbatches < 2 * ranks:
            raise SizeError(
                "DualPipeV takes at least one microbatch per stage (microbatches: "
                f"{microbatches}, stages: {2 * ranks}); use {2 * ranks} or more, or ZBVZeroBubble"
            )
        case _:
            # DualPipeV has no idle slots, and torch does not have the other families.
            return list(actions)


def _count_ahead(rank: int, ranks: int, microbatches: int, per_rank: int, factor: int) -> int:
    """Return the forwards of an interleaved schedule before its first backward, less one."""
    first_round = -(-microbatches // max(1, microbatches // ranks))
    return _get_warmup_ops(rank, per_rank, first_round, ranks, microbatches, factor)


def build_order(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Order:
    """Return every rank's order, by the name of a family or of torch's class for it."""
    sizes = (ranks, microbatches, stages_per_rank)
    order = {rank: order_of_rank(name, rank, *sizes) for rank in range(ranks)}
    if find_family(name).name == "InterleavedZeroBubble":
        return add_bubbles(order, len(read_stage_ranks(order)))
    return order


def add_bubbles(order: AnyOrder, num_stages: int) -> Order:
    """Put in idle slots before forwards and full backwards that come too early."""
    schedule = to_schedule(order, read_stage_ranks(order).__getitem__, num_stages)
    rows, graph = schedule.rows, build_graph(schedule)
    # Halves of backwards wait for nothing.
    waits = ~rows.is_kind(Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    kept = np.repeat(waits, np.diff(graph.first))
    first = np.concatenate(([0], np.cumsum(kept, dtype=np.int64)))[graph.first]
    graph = Graph(first, graph.need[kept], graph.link[kept])
    return fill_slots(schedule, run_slots(schedule, graph), order)


def _get_warmup_ops(
    rank: int,
    n_local_stages: int,
    microbatches_per_round: int,
    pp_group_size: int,
    n_microbatches: int,
    multiply_factor: int = 2,
) -> int:
    hops = pp_group_size - 1 - rank
    ahead = (n_local_stages - 1) * microbatches_per_round + multiply_factor * hops
    return min(ahead, n_local_stages * n_microbatches)


def _get_1f1b_rank_ops(
    n_local_stages: int,
    pp_group_size: int,
    warmup_ops: int,
    fwd_bwd_ops: int,
    cooldown_ops: int,
    rank: int,
    forward_stage_index: Callable[[int], int],
    backward_stage_index: Callable[[int], int],
    num_1f1b_microbatches: int = 0,
    enable_zero_bubble: bool = False,
) -> Slots:
    """Return one rank's order, given the stage that each step runs forward and backward."""
    begin, end = warmup_ops, warmup_ops + fwd_bwd_ops + cooldown_ops
    forwards = _visit(Kind.FORWARD, map(forward_stage_index, range(begin + fwd_bwd_ops)))
    back = [backward_stage_index(step) for step in range(begin, end)]
    if enable_zero_bubble:
        inputs, weights = _visit(Kind.BACKWARD_INPUT, back), _visit(Kind.BACKWARD_WEIGHT, back)
        moves = weave(forwards, inputs, weights, ahead=warmup_ops, delay=num_1f1b_microbatches)
        wait, drain = pp_group_size - 1 - rank, 0
    else:
        backwards = _visit(Kind.FULL_BACKWARD, back)
        moves = join([forwards[:warmup_ops], alternate(forwards[warmup_ops:], backwards)])
        wait = _wait_for_backward(rank, pp_group_size, n_local_stages, warmup_ops)
        drain = cooldown_ops
    rows = Rows.from_moves([len(moves)], moves.kind, moves.stage, moves.microbatch, moves.joined)
    actions = list(to_actions(rows, 0))
    return _insert_idle(actions, rank, ahead=warmup_ops, wait=wait, drain=drain)


def _insert_idle(
    actions: Sequence[_Action], rank: int, *, ahead: int, wait: int, drain: int = 0
) -> Slots:
    steady = len(actions) - drain
    last = [slot for action in actions[steady:] for slot in (None, action)]
    between = [None] * (wait if ahead else 0)
    return [*[None] * rank, *actions[:ahead], *between, *actions[ahead:steady], *last]


def _wait_for_backward(rank: int, ranks: int, stages_per_rank: int, ahead: int) -> int:
    """Return the slots between the last forward run ahead and the first backward."""
    return stages_per_rank * ranks + 2 * (ranks - 1 - rank) - (ahead + rank)


@lru_cache(maxsize=1)
def _schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Build a whole schedule, and keep it for the next rank that needs its part of it."""
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


def _visit(kind: Kind, stages: Iterable[int]) -> Moves:
    """Do one kind of work on these stages in turn, counting the microbatches of each."""
    stage = np.array(list(stages), dtype=np.int32)
    kinds = np.full(len(stage), kind)
    microbatch = count_microbatches(kinds, stage, int(stage.max(initial=-1)) + 1)
    return Moves(kinds, stage, microbatch, np.zeros(len(stage), np.bool_))
