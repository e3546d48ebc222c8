"""The lowering passes of `torch.distributed.pipelining`, on lists of actions.

    compute only  ->  _add_unshard_reshard  ->  _add_reduce_grad  ->  _add_send_recv

Each returns new lists and leaves its argument unchanged. What is run is lowered in one go, by
`lower_order`: that is Penstock's own lowering (`penstock.assembly`), and gives the same lists.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

from penstock.assembly import lower
from penstock.dropin.names.actions import (
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    B,
    F,
    I,
    W,
    _Action,
    _ComputationType,
    to_work,
)
from penstock.dropin.names.lists import (
    OrderError,
    apply_to_rank,
    from_schedule,
    make_schedule,
    members,
    to_schedule,
)
from penstock.errors import ScheduleError
from penstock.ir.actions import Action
from penstock.ir.schedule import Schedule
from penstock.passes.backward import merge_backward
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.passes.send_recv import add_send_recv
from penstock.passes.shard import add_unshard_reshard

__all__ = [
    "_add_reduce_grad",
    "_add_send_recv",
    "_add_unshard_reshard",
    "_defer_recv_ops",
    "_merge_bw",
    "_requires_reduce_grad",
    "lower_order",
]

# Which receive brings what a kind of work uses, if that comes from another rank.
_RECEIVE_FOR = {F: RECV_F, I: RECV_B, B: RECV_B}


def lower_order(
    order: Mapping[int, Sequence[_Action | None]],
    holder: Mapping[int, int],
    microbatches: int,
    *,
    edges: Sequence[tuple[int, int]] | None = None,
    receives: Literal["early", "late"] = "early",
    max_active_stages: int = 3,
) -> Schedule:
    """Return an order of compute with all that a runtime needs, over a chain unless edges say so.

    `holder` has the rank of each stage. Late receives are safe here even if sends wait for them,
    unlike those of `_defer_recv_ops`.
    """
    schedule = make_schedule(order, holder, microbatches, edges)
    return lower(schedule, receives=receives, whole_stages=max_active_stages)


def _merge_bw(compute_actions: Sequence[_Action | None]) -> list[_Action]:
    """Make one B of an I and the W of the same stage and microbatch right after it."""
    return apply_to_rank(merge_backward, compute_actions)


def _add_unshard_reshard(
    compute_actions: Sequence[_Action | None], max_active_stages: int = 3
) -> list[_Action]:
    """Gather the next stages that a rank will use, and let go of those it will not use soon."""
    change = partial(add_unshard_reshard, whole_stages=max_active_stages)
    return apply_to_rank(change, compute_actions)


def _requires_reduce_grad(action_type: _ComputationType) -> bool:
    """Whether this adds to the gradients of weights."""
    return action_type in (W, B)


def _add_reduce_grad(
    actions: Sequence[_Action | None], n_microbatches: int
) -> list[_Action | None]:
    """Put REDUCE_GRAD after the last backward of each stage that has one per microbatch."""
    backwards = Counter(
        member.stage_index
        for action in actions
        if action is not None
        for member in members(action)
        if _requires_reduce_grad(member.computation_type)
    )
    return [
        action
        for action in apply_to_rank(add_reduce_grad, actions)
        if action.computation_type != REDUCE_GRAD
        or backwards[action.stage_index] >= n_microbatches
    ]


def _add_send_recv(
    compute_actions: Mapping[int, Sequence[_Action | None]],
    stage_to_rank: Callable[[int], int],
    num_stages: int,
) -> dict[int, list[_Action]]:
    """Put in sends and receives; an idle slot is a turn in which a rank does nothing."""
    schedule = to_schedule(compute_actions, stage_to_rank, num_stages)
    try:
        return from_schedule(add_send_recv(schedule), compute_actions)
    except ScheduleError as error:
        raise OrderError(str(error)) from error


def _defer_recv_ops(
    actions: Mapping[int, Sequence[_Action]], stage_to_rank: Callable[[int], int]
) -> dict[int, list[_Action]]:
    """Move each receive down to the work that uses it, or to a send to the same, higher rank.

    This is torch's rule to the letter. It assumes that sends do not wait, and it lets receives
    overtake one another, so that messages without tags may be mixed up. Nothing is run like that.
    """
    return {
        rank: list(_move_receives_down(rank, order, stage_to_rank))
        for rank, order in actions.items()
    }


def _move_receives_down(
    rank: int, order: Sequence[_Action], stage_to_rank: Callable[[int], int]
) -> Iterator[_Action]:
    # The receives that were passed, and wait for their use.
    pending: list[_Action] = []
    for action in order:
        if action.computation_type in (RECV_F, RECV_B):
            pending.append(action)
            continue
        if action.computation_type in (SEND_F, SEND_B):
            # Of two ranks that send to one another, the lower one posts its receives first.
            peer = _peer(action, stage_to_rank)
            due = [r for r in pending if rank < peer == _peer(r, stage_to_rank)]
        else:
            # What the action would receive if all that it uses came from other ranks.
            used = [
                _Action(member.stage_index, _RECEIVE_FOR[kind], member.microbatch_index)
                for member in members(action)
                if (kind := member.computation_type) in _RECEIVE_FOR
            ]
            due = [receive for receive in used if receive in pending]
        pending = [receive for receive in pending if receive not in due]
        yield from (*due, action)
    if pending:
        raise OrderError(
            f"rank {rank}, {pending[0]}: no work after it uses what it receives; leave it out, "
            "or add the work"
        )


def _peer(action: _Action, stage_to_rank: Callable[[int], int]) -> int:
    """Return the rank at the other end of a communication."""
    work = to_work(action)
    assert isinstance(work, Action)
    assert work.peer is not None
    return stage_to_rank(work.peer)
