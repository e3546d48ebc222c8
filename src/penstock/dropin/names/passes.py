"""The lowering passes of `torch.distributed.pipelining`, on lists of actions.

    compute only  ->  _add_unshard_reshard  ->  _add_reduce_grad  ->  _add_send_recv

What is run is lowered in one go, by `lower_order`: that is Penstock's own lowering
(`penstock.assembly`), and gives the same lists.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from penstock.assembly import lower
from penstock.dropin.names.actions import _Action, _ComputationType, to_work
from penstock.dropin.names.lists import (
    AnyOrder,
    AnySlots,
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

_Type = _ComputationType

# Which receive brings what a kind of work uses, if that comes from another rank.
_RECEIVE_FOR = {
    _Type.FORWARD: _Type.RECV_F,
    _Type.BACKWARD_INPUT: _Type.RECV_B,
    _Type.FULL_BACKWARD: _Type.RECV_B,
}


def lower_order(
    order: AnyOrder,
    holder: Mapping[int, int],
    microbatches: int,
    *,
    edges: Sequence[tuple[int, int]] | None = None,
    receives: Literal["early", "late"] = "early",
    max_active_stages: int = 3,
) -> Schedule:
    """Return an order of compute with all that a runtime needs, over a chain or these edges."""
    schedule = make_schedule(order, holder, microbatches, edges)
    return lower(schedule, receives=receives, whole_stages=max_active_stages)


def _merge_bw(compute_actions: AnySlots) -> list[_Action]:
    """Make one B of an I and the W of the same stage and microbatch right after it."""
    return apply_to_rank(merge_backward, compute_actions)


def _add_unshard_reshard(compute_actions: AnySlots, max_active_stages: int = 3) -> list[_Action]:
    """Gather the next stages that a rank will use, and let go of those it will not use soon."""
    return apply_to_rank(
        lambda schedule: add_unshard_reshard(schedule, whole_stages=max_active_stages),
        compute_actions,
    )


def _requires_reduce_grad(action_type: _ComputationType) -> bool:
    return action_type in (_Type.BACKWARD_WEIGHT, _Type.FULL_BACKWARD)


def _add_reduce_grad(actions: AnySlots, n_microbatches: int) -> list[_Action | None]:
    """Put REDUCE_GRAD after the last backward of each stage that has one per microbatch."""
    works = [work for action in actions if action is not None for work in members(action)]
    done = Counter(w.stage_index for w in works if _requires_reduce_grad(w.computation_type))
    return [
        action
        for action in apply_to_rank(add_reduce_grad, actions)
        if action.computation_type != _Type.REDUCE_GRAD
        or done[action.stage_index] >= n_microbatches
    ]


def _add_send_recv(
    compute_actions: AnyOrder, stage_to_rank: Callable[[int], int], num_stages: int
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

    def peer(message: _Action) -> int:
        work = to_work(message)
        assert isinstance(work, Action), "a message has one action"
        assert work.peer is not None, "a message has another end"
        return stage_to_rank(work.peer)

    return {rank: list(_move_receives_down(rank, actions[rank], peer)) for rank in actions}


def _move_receives_down(
    rank: int, order: Sequence[_Action], peer: Callable[[_Action], int]
) -> Iterator[_Action]:
    # The receives that were passed, and wait for their use.
    pending: list[_Action] = []
    for action in order:
        if action.computation_type in (_Type.RECV_F, _Type.RECV_B):
            pending.append(action)
            continue
        if action.computation_type in (_Type.SEND_F, _Type.SEND_B):
            # Of two ranks that send to one another, the lower one posts its receives first.
            due = [receive for receive in pending if rank < peer(action) == peer(receive)]
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
