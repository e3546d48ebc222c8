"""The lowering passes of `torch.distributed.pipelining`, on lists of actions.

    compute only  ->  _add_unshard_reshard  ->  _add_reduce_grad  ->  _add_send_recv

Each returns new lists and leaves its argument unchanged.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.dropin.names.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    _Action,
    _ComputationType,
    to_work,
)
from penstock.dropin.names.lists import (
    OrderError,
    apply_to_rank,
    from_schedule,
    members,
    to_schedule,
)
from penstock.errors import ScheduleError
from penstock.ir.actions import Action
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
    "defer_receives",
    "lower_order",
]

# Which receive brings what a kind of work uses, if that comes from another rank.
_RECEIVE_FOR = {FORWARD: RECV_F, BACKWARD_INPUT: RECV_B, FULL_BACKWARD: RECV_B}


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
    return action_type in (BACKWARD_WEIGHT, FULL_BACKWARD)


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


def lower_order(
    compute_actions: Mapping[int, Sequence[_Action | None]],
    stage_to_rank: Callable[[int], int],
    num_stages: int,
    n_microbatches: int,
    *,
    defer_pp_recv: bool = False,
    max_active_stages: int = 3,
) -> dict[int, list[_Action]]:
    """Apply all passes that an order of compute needs before a runtime can run it."""
    actions = {
        rank: _add_reduce_grad(_add_unshard_reshard(order, max_active_stages), n_microbatches)
        for rank, order in compute_actions.items()
    }
    lowered = _add_send_recv(actions, stage_to_rank, num_stages)
    return defer_receives(lowered, stage_to_rank) if defer_pp_recv else lowered


def defer_receives(
    actions: Mapping[int, Sequence[_Action]], stage_to_rank: Callable[[int], int]
) -> dict[int, list[_Action]]:
    """Move receives down by torch's rule, but let none overtake another from the same rank."""
    return {
        rank: list(_Deferral(rank, stage_to_rank, keeps_order=True).run(order))
        for rank, order in actions.items()
    }


def _defer_recv_ops(
    actions: Mapping[int, Sequence[_Action]], stage_to_rank: Callable[[int], int]
) -> dict[int, list[_Action]]:
    """Move each receive down to the work that uses it, or to a send to the same, higher rank.

    This is torch's rule to the letter. It assumes that sends do not wait, and it lets receives
    overtake one another, so that messages without tags may be mixed up; `defer_receives` is the
    same without that.
    """
    return {
        rank: list(_Deferral(rank, stage_to_rank, keeps_order=False).run(order))
        for rank, order in actions.items()
    }


@dataclass(slots=True)
class _Deferral:
    """One rank's list while its receives are moved down; `pending` are those passed so far."""

    rank: int
    stage_to_rank: Callable[[int], int]
    keeps_order: bool
    pending: list[_Action] = field(default_factory=list)

    def run(self, order: Sequence[_Action]) -> Iterator[_Action]:
        """Yield the list with its receives moved down."""
        for action in order:
            if action.computation_type in (RECV_F, RECV_B):
                self.pending.append(action)
                continue
            if action.computation_type in (SEND_F, SEND_B):
                # Of two ranks that send to one another, the lower one posts its receives first.
                if self.rank < (peer := self._peer(action)):
                    yield from self._post(self._pending_from(peer))
            else:
                for receive in self._receives_for(action):
                    yield from self._post(self._up_to(receive))
            yield action
        if self.pending:
            raise OrderError(
                f"rank {self.rank}, {self.pending[0]}: no work after it uses what it receives; "
                "leave it out, or add the work"
            )

    def _receives_for(self, action: _Action) -> Iterator[_Action]:
        """Yield the pending receives of what an action uses."""
        for member in members(action):
            kind = _RECEIVE_FOR.get(member.computation_type)
            if kind is not None:
                receive = _Action(member.stage_index, kind, member.microbatch_index)
                if receive in self.pending:
                    yield receive

    def _up_to(self, receive: _Action) -> list[_Action]:
        """Return a receive after the receives that must be posted before it."""
        if not self.keeps_order:
            return [receive]
        earlier = self._pending_from(self._peer(receive))
        return earlier[: earlier.index(receive) + 1]

    def _pending_from(self, peer: int) -> list[_Action]:
        return [receive for receive in self.pending if self._peer(receive) == peer]

    def _post(self, receives: list[_Action]) -> list[_Action]:
        self.pending = [receive for receive in self.pending if receive not in receives]
        return receives

    def _peer(self, action: _Action) -> int:
        """Return the rank at the other end of a communication."""
        work = to_work(action)
        assert isinstance(work, Action)
        assert work.peer is not None
        return self.stage_to_rank(work.peer)
