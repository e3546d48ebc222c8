"""The orders of torch's schedule classes, per rank, with the idle slots that torch lists.

What is done, and in which order, comes from `penstock.schedules`; here it gets its idle slots:

    Interleaved1F1B    rank 0   0F0 0F1 2F0 2F1  .   .   .  2B0  .  2B1  .  0B0  .  0B1
                       rank 1    .  1F0 1F1  .  3F0 3B0 3F1 3B1  .  1B0  .  1B1
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from penstock.assembly import build
from penstock.dropin.names.actions import _Action
from penstock.dropin.names.columns import to_actions
from penstock.dropin.names.lists import Order, Slots, fill_slots, read_stage_ranks, to_schedule
from penstock.errors import DeadlockError, SizeError
from penstock.ir.actions import Kind
from penstock.ir.clock import run_in_order
from penstock.ir.graph import Graph, build_graph
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.schedules.moves import Moves, alternate, count_microbatches, join
from penstock.schedules.registry import find_family
from penstock.schedules.zero_bubble import weave

__all__ = [
    "_get_1f1b_rank_ops",
    "_get_warmup_ops",
    "add_bubbles",
    "build_order",
    "dualpipe_v_order",
    "gpipe_order",
    "interleaved_one_f_one_b_order",
    "interleaved_zero_bubble_order",
    "looped_bfs_order",
    "one_f_one_b_order",
    "zbv_order",
]


def gpipe_order(rank: int, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Slots:
    """Run all forwards, then all backwards, then the reduction of gradients."""
    return _reduced("GPipe", rank, ranks, microbatches, stages_per_rank)


def one_f_one_b_order(rank: int, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Slots:
    """Run forwards and backwards in turn, then the reduction of gradients."""
    return _reduced("1F1B", rank, ranks, microbatches, stages_per_rank)


def looped_bfs_order(rank: int, ranks: int, microbatches: int, stages_per_rank: int = 2) -> Slots:
    """Run one stage after the other forward, and back; two idle slots per hop at the turn."""
    actions = _actions("LoopedBFS", rank, ranks, microbatches, stages_per_rank)
    turn = len(actions) // 2
    hops = ranks - 1 - rank
    return [*_idle(rank), *actions[:turn], *_idle(2 * hops), *actions[turn:]]


def interleaved_one_f_one_b_order(
    rank: int, ranks: int, microbatches: int, stages_per_rank: int = 2
) -> Slots:
    """Return 1F1B over several stages; idle before the first backward, and at the end."""
    actions = _actions("Interleaved1F1B", rank, ranks, microbatches, stages_per_rank)
    size = _round_size(ranks, microbatches)
    ahead = _get_warmup_ops(rank, stages_per_rank, size, ranks, microbatches)
    wait = _wait_for_backward(rank, ranks, stages_per_rank, ahead)
    return _insert_idle(actions, rank, ahead=ahead, wait=wait, drain=ahead)


def interleaved_zero_bubble_order(
    rank: int, ranks: int, microbatches: int, stages_per_rank: int = 2
) -> Slots:
    """Return interleaved 1F1B with a split backward, before `add_bubbles` sees other ranks."""
    actions = _actions("InterleavedZeroBubble", rank, ranks, microbatches, stages_per_rank)
    size = _round_size(ranks, microbatches)
    ahead = _get_warmup_ops(rank, stages_per_rank, size, ranks, microbatches, multiply_factor=1)
    return _insert_idle(actions, rank, ahead=ahead, wait=ranks - 1 - rank, drain=0)


def zbv_order(rank: int, ranks: int, microbatches: int, stages_per_rank: int = 2) -> Slots:
    """Return the fixed V order; with few microbatches, idle where a full V would have work."""
    full = max(2 * ranks - 1, microbatches)
    actions = _actions("ZBV", rank, ranks, full, stages_per_rank)
    kept = (a if (a.microbatch_index or 0) < microbatches else None for a in actions)
    return [*_idle(rank), *kept]


def dualpipe_v_order(rank: int, ranks: int, microbatches: int, stages_per_rank: int = 2) -> Slots:
    """Return the V with overlapped forwards and backwards, without idle slots."""
    actions = _actions("DualPipeV", rank, ranks, microbatches, stages_per_rank)
    if microbatches < 2 * ranks:
        raise SizeError(
            f"DualPipeV takes at least one microbatch per stage (microbatches: {microbatches}, "
            f"stages: {2 * ranks}); use {2 * ranks} or more, or ZBVZeroBubble"
        )
    return list(actions)


_ORDERS: Mapping[str, Callable[[int, int, int, int], Slots]] = {
    "GPipe": gpipe_order,
    "1F1B": one_f_one_b_order,
    "LoopedBFS": looped_bfs_order,
    "Interleaved1F1B": interleaved_one_f_one_b_order,
    "InterleavedZeroBubble": interleaved_zero_bubble_order,
    "ZBV": zbv_order,
    "DualPipeV": dualpipe_v_order,
}


def build_order(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Order:
    """Return every rank's order, by the name of a family or of torch's class for it.

    Families that torch does not have come without idle slots.

    >>> build_order("ScheduleLoopedBFS", 2, 1)
    {0: [0F0, 2F0, None, None, 2B0, 0B0], 1: [None, 1F0, 3F0, 3B0, 1B0]}
    """
    family = find_family(name)
    per_rank = family.stages_per_rank if stages_per_rank is None else stages_per_rank
    if family.name not in _ORDERS:
        return {
            rank: [*_actions(family.name, rank, ranks, microbatches, per_rank)]
            for rank in range(ranks)
        }
    order_of_rank = _ORDERS[family.name]
    order = {rank: order_of_rank(rank, ranks, microbatches, per_rank) for rank in range(ranks)}
    if order_of_rank is interleaved_zero_bubble_order:
        return add_bubbles(order, ranks * per_rank)
    return order


def add_bubbles(order: Mapping[int, Sequence[_Action | None]], num_stages: int) -> Order:
    """Put in idle slots so that every forward and full backward comes after what it needs.

    All ranks take their slots in step. Halves of a backward are taken as they come.
    """
    holder = read_stage_ranks(order)
    schedule = to_schedule(order, holder.__getitem__, num_stages)
    graph = _without_halves(schedule, build_graph(schedule))
    ones, lag = np.ones(len(schedule.rows)), np.zeros(len(graph.need))
    run = run_in_order(schedule.rows, graph, duration=ones, busy=ones, lag=lag)
    if not run.is_finished:
        raise DeadlockError("the order never finishes, so no idle slots help; check it first")
    return fill_slots(schedule, run.start, order)


def _get_warmup_ops(
    rank: int,
    n_local_stages: int,
    microbatches_per_round: int,
    pp_group_size: int,
    n_microbatches: int,
    multiply_factor: int = 2,
) -> int:
    """Return one less than the forwards of an interleaved schedule before its first backward."""
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
    return _insert_idle(_list_moves(moves), rank, ahead=warmup_ops, wait=wait, drain=drain)


def _insert_idle(
    actions: Sequence[_Action], rank: int, *, ahead: int, wait: int, drain: int
) -> Slots:
    """Put in idle slots for the later start, for the wait, and before each of the last actions."""
    steady = len(actions) - drain
    last = [slot for action in actions[steady:] for slot in (None, action)]
    between = _idle(wait if ahead else 0)
    return [*_idle(rank), *actions[:ahead], *between, *actions[ahead:steady], *last]


def _wait_for_backward(rank: int, ranks: int, stages_per_rank: int, ahead: int) -> int:
    """Return the slots between the last forward run ahead and the first backward."""
    first_backward = stages_per_rank * ranks + 2 * (ranks - 1 - rank)
    return first_backward - (ahead + rank)


def _round_size(ranks: int, microbatches: int) -> int:
    """Return how many microbatches the first round of an interleaved schedule has."""
    return -(-microbatches // max(1, microbatches // ranks))


def _idle(slots: int) -> Slots:
    return [None] * slots


def _reduced(name: str, rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Slots:
    schedule = add_reduce_grad(_schedule(name, ranks, microbatches, stages_per_rank))
    return list(to_actions(schedule.rows, rank))


def _actions(
    name: str, rank: int, ranks: int, microbatches: int, stages_per_rank: int
) -> list[_Action]:
    schedule = _schedule(name, ranks, microbatches, stages_per_rank)
    return list(to_actions(schedule.rows, rank))


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


def _list_moves(moves: Moves) -> list[_Action]:
    rows = Rows.from_moves([len(moves)], moves.kind, moves.stage, moves.microbatch, moves.joined)
    return list(to_actions(rows, 0))


def _without_halves(schedule: Schedule, graph: Graph) -> Graph:
    """Return a graph in which the halves of backwards wait for nothing."""
    waits = ~schedule.rows.is_kind(Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    kept = np.repeat(waits, np.diff(graph.first))
    first = np.concatenate(([0], np.cumsum(kept, dtype=np.int64)))[graph.first]
    return Graph(first, graph.need[kept], graph.link[kept])
