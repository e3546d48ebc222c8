"""What each kind of action does in torch's terms, called by the executor in the action's place.

Every action goes through the methods of its stage that torch's schedules call, so that what a
client has put there takes effect. Waiting, sending, failing and recording are the executor's.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import SimpleNamespace
from typing import Any, Protocol

import torch.distributed as dist

from penstock.dropin.names.actions import (
    OVERLAP_F_B,
    TYPE_OF_KIND,
    _Action,
    _ComputationType,
    from_work,
)
from penstock.dropin.names.lists import OrderError
from penstock.dropin.run.packets import (
    deliver_gradients,
    deliver_inputs,
    pack_gradients,
    pack_outputs,
)
from penstock.dropin.run.session import Session
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.metadata import PipeliningMetadataError
from penstock.ir.actions import Action, Kind
from penstock.step.executor import Executor
from penstock.tensors.packet import Packet

__all__ = [
    "StepActions",
    "_CustomFunctionProtocol",
    "_PipelineContext",
    "_batch_p2p",
    "_sorted_batch_p2p",
    "_wait_batch_p2p",
]

# By stage and microbatch, the receives that are posted.
_Posted = dict[tuple[int, int], list[Any]]


@dataclass
class _PipelineContext:
    """What a step runs on, one item per microbatch; custom functions are given it."""

    schedule_ref: Any
    arg_mbs: Any = None
    kwarg_mbs: Any = None
    target_mbs: Any = None
    losses: Any = None


class _CustomFunctionProtocol(Protocol):
    """Does in the user's way what a kind of action does."""

    def __call__(self, action: _Action, ctx: _PipelineContext) -> None:
        """Do it."""


class StepActions:
    """What is under way while a rank runs its actions; custom functions may look at it."""

    def __init__(self) -> None:
        self.fwd_recv_ops: _Posted = {}
        self.bwd_recv_ops: _Posted = {}
        # How many backwards (or second halves) each stage has done.
        self.backward_counter: Counter[int] = Counter()
        self.unshard_ops: dict[int, list[Any]] = defaultdict(list)
        self.unsharded_stages: set[int] = set()
        self.custom_functions: dict[_ComputationType, Callable[..., None]] = {}
        # The action that is run now, which reports of a failure name.
        self.current: Action | None = None
        self._sharded: set[int] = set()
        self._taking = Lock()
        # What one packing has left for the sends that follow.
        self._packed: dict[tuple[Kind, int, int], dict[int, Packet]] = {}
        self._do: Mapping[Kind, Callable[[Action, Callable[[], None]], None]] = {
            Kind.FORWARD: self._forward,
            Kind.FULL_BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.UNSHARD: self._unshard,
            Kind.RESHARD: self._reshard,
            Kind.REDUCE_GRAD: self._reduce,
        }

    def begin(
        self,
        stages: Mapping[int, _PipelineStageBase],
        executor: Executor,
        session: Session,
        context: _PipelineContext,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> None:
        """Begin a step on these stages of this rank."""
        self._stages, self._executor, self._session = stages, executor, session
        self._context, self._owner, self.current = context, context.schedule_ref, None
        self._returns_outputs = return_outputs
        # A client's own schedule may leave out what it does not use.
        self._loss_kwargs = () if loss_kwargs is None else (loss_kwargs,)
        self._sharded = {index for index, stage in stages.items() if stage.is_sharded}
        self.backward_counter.clear()

    def end(self, *, has_failed: bool) -> None:
        """End a step, and let go of what a failure has left."""
        # The batch must not outlive its step, nor the schedule be held by what it holds.
        del self._owner, self._executor, self._session, self._context, self._loss_kwargs
        gathered = sorted(self.unshard_ops)
        self.unshard_ops.clear()
        if has_failed:
            left: list[Any] = [self.fwd_recv_ops, self.bwd_recv_ops, self._packed]
            for held in (*left, self.unsharded_stages):
                held.clear()
            return
        self.current = None
        if gathered:
            raise OrderError(f"stages {gathered} were not used; put UNSHARD before an action")

    def perform(self, action: Action, run: Callable[[], None]) -> None:
        """Do what an action says, or what the user's function for it does."""
        self.current = action
        try:
            if not (self.custom_functions and self._is_custom(action)):
                self._do[action.kind](action, run)
        except PipeliningMetadataError as error:
            self.current = action
            self._session.refuse(error)
            raise
        except Exception:
            # Another action of the same overlap may have begun since.
            self.current = action
            raise

    def _is_custom(self, action: Action) -> bool:
        """Call the user's function for an action, or for the overlap that it is part of."""
        overlap = self._session.overlaps.get(action)
        kind = TYPE_OF_KIND[action.kind] if overlap is None else OVERLAP_F_B
        custom = self.custom_functions.get(kind)
        if custom is None:
            return False
        members = (action,) if overlap is None else overlap.actions
        if action == members[0]:
            for member in members:
                is_backward = member.kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)
                if is_backward and not self._stages[member.stage].has_backward:
                    # In a run without backwards, the user's function finds no gradients.
                    self.bwd_recv_ops.setdefault((member.stage, member.microbatch or 0), [])
            custom(from_work(overlap or action), self._context)
        return True

    def _forward(self, action: Action, _: Callable[[], None]) -> None:
        stage, microbatch, index = self._stages[action.stage], action.microbatch or 0, action.stage
        context = self._context
        if index in self._sharded:
            self.assert_unsharded(stage)
        if not stage.is_first and index - 1 not in self._stages:
            self._await(self.fwd_recv_ops, action, "RECV_F")
        args, kwargs = context.arg_mbs[microbatch], context.kwarg_mbs[microbatch]
        keeps = self._returns_outputs
        output = stage.forward_one_chunk(microbatch, args, kwargs, save_forward_output=keeps)
        targets = context.target_mbs
        self._owner._maybe_compute_loss(stage, output, targets, microbatch, *self._loss_kwargs)
        if index + 1 in self._stages:
            self._stages[index + 1].set_local_fwd_input(output, microbatch)

    def _backward(self, action: Action, _: Callable[[], None]) -> None:
        stage, microbatch, index = self._stages[action.stage], action.microbatch or 0, action.stage
        if index in self._sharded:
            self.assert_unsharded(stage)
        if stage.has_backward and not stage.is_last and index + 1 not in self._stages:
            self._await(self.bwd_recv_ops, action, "RECV_B")
        loss = self._owner._maybe_get_loss(stage, microbatch)
        is_full = action.kind is Kind.FULL_BACKWARD
        last = is_full and self._count_backward(index)
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=is_full, last_backward=last)
        if stage.has_backward and index - 1 in self._stages:
            gradients = stage.get_local_bwd_output(microbatch)
            self._stages[index - 1].set_local_bwd_input(gradients, microbatch)

    def _backward_weight(self, action: Action, _: Callable[[], None]) -> None:
        stage = self._stages[action.stage]
        self.assert_unsharded(stage)
        last = self._count_backward(action.stage)
        stage.backward_weight_one_chunk(action.microbatch or 0, last_backward=last)

    def _count_backward(self, stage: int) -> bool:
        """Count a backward that completes the weight gradients; return whether it was the last."""
        self.backward_counter[stage] += 1
        return bool(self.backward_counter[stage] == self._owner._n_microbatches)

    def _await(self, posted: _Posted, action: Action, text: str) -> None:
        works = posted.pop((action.stage, action.microbatch or 0), None)
        if works is None:
            raise OrderError(
                f"stage {action.stage} uses microbatch {action.microbatch} before it is received; "
                f"put {action.stage}{text}{action.microbatch} before it"
            )
        _wait_batch_p2p(works)

    def _receive(self, action: Action, run: Callable[[], None]) -> None:
        run()
        is_forward = action.kind is Kind.RECV_F
        posted = self.fwd_recv_ops if is_forward else self.bwd_recv_ops
        deliver = deliver_inputs if is_forward else deliver_gradients
        stage, microbatch = self._stages[action.stage], action.microbatch or 0

        def wait() -> None:
            # A function of the user's may wait in several threads, the transport in one.
            with self._taking:
                packet = self._executor.take(self._executor.messages.of(action))
                deliver(stage, microbatch, action.peer or 0, packet)

        posted.setdefault((action.stage, microbatch), []).append(SimpleNamespace(wait=wait))

    def _send(self, action: Action, run: Callable[[], None]) -> None:
        key = action.kind, action.stage, action.microbatch or 0
        if key not in self._packed:
            pack = pack_outputs if action.kind is Kind.SEND_F else pack_gradients
            self._packed[key] = pack(self._stages[action.stage], key[2])
        packet = self._packed[key].pop(action.peer or 0)
        if not self._packed[key]:
            del self._packed[key]
        self._executor.hold(self._executor.messages.of(action), packet)
        run()

    def assert_unsharded(self, stage: _PipelineStageBase) -> None:
        """Wait until the parameters of a stage are gathered."""
        if not stage.is_sharded:
            return
        index = stage.stage_index
        if index in self.unshard_ops:
            _wait_batch_p2p(self.unshard_ops.pop(index))
            self.unsharded_stages.add(index)
        if index not in self.unsharded_stages:
            raise OrderError(f"stage {index} runs while it is sharded; put UNSHARD before it")

    def _unshard(self, action: Action, _: Callable[[], None]) -> None:
        stage, index = self._stages[action.stage], action.stage
        if index in self._sharded:
            if index in self.unsharded_stages or index in self.unshard_ops:
                raise OrderError(f"stage {index} is gathered twice; put a RESHARD between")
            stage.runtime.replica.unshard()
            self.unsharded_stages.add(index)

    def _reshard(self, action: Action, _: Callable[[], None]) -> None:
        stage = self._stages[action.stage]
        if action.stage in self._sharded:
            if action.stage not in self.unsharded_stages:
                raise OrderError(f"stage {action.stage} is resharded, but was not gathered")
            stage.runtime.replica.reshard()
            self.unsharded_stages.remove(action.stage)

    def _reduce(self, action: Action, _: Callable[[], None]) -> None:
        factor = self._owner._n_microbatches if self._owner.scale_grads else 1
        self._stages[action.stage].perform_reduce_grad(factor)


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:  # noqa: ARG001  # torch's form
    """Start operations: each for itself if all go one way, else as one batch."""
    kinds = {op.op for op in p2p_ops}
    if len(kinds) > 1:
        return list(dist.batch_isend_irecv(p2p_ops))
    peer = "group_dst" if kinds == {dist.isend} else "group_src"
    return [
        op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer}) for op in p2p_ops
    ]


def _sorted_batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> dict[int, list[Any]]:
    """Start operations rank by rank, in rising order of ranks; return the works of each rank."""
    peers = sorted({op.peer for op in p2p_ops})
    return {peer: _batch_p2p([op for op in p2p_ops if op.peer == peer], desc) for peer in peers}


def _wait_batch_p2p(work: Sequence[Any]) -> None:
    for item in work:
        item.wait()
