"""Runs one rank's list of actions on its stages."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from penstock.dropin.names.actions import (
    _Action,
    _ComputationType,
    _get_profiler_function_name,
)
from penstock.dropin.names.lists import OrderError, members
from penstock.dropin.run.p2p import Outgoing, ReceiveQueue, _batch_p2p, _wait_batch_p2p
from penstock.dropin.stages.base import _PipelineStageBase

__all__ = ["ActionRunner", "StepBatch"]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What a step runs on, one item per microbatch, and what it gives back."""

    arg_mbs: Sequence[Any]
    kwarg_mbs: Sequence[Any]
    target_mbs: Sequence[Any] | None
    return_outputs: bool
    loss_kwargs: dict[str, Any] | None


class Owner(Protocol):
    """The schedule whose actions are run."""

    _n_microbatches: int
    scale_grads: bool

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None: ...

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> torch.Tensor | None: ...


class ActionRunner:
    """What is under way while a rank runs its actions; custom functions may look at it."""

    def __init__(self) -> None:
        # Receives that are posted, by stage and microbatch.
        self.fwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        self.bwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        # How many backwards (or second halves) each stage has done.
        self.backward_counter: Counter[int] = Counter()
        self.unshard_ops: dict[int, list[Any]] = defaultdict(list)
        self.unsharded_stages: set[int] = set()
        self.custom_functions: dict[_ComputationType, Callable[..., None]] = {}
        self._sends = Outgoing()
        self._receives = ReceiveQueue()

    def run(
        self,
        owner: Owner,
        stages: Sequence[_PipelineStageBase],
        actions: Sequence[_Action | None],
        batch: StepBatch,
        *,
        context: Any,
        sends_may_wait: bool,
    ) -> None:
        """Run every action once; `context` is what custom functions are given."""
        held = {stage.stage_index: stage for stage in stages}
        run = _Run(self, owner, held, batch, sends_may_wait)
        self.backward_counter.clear()
        try:
            for position, action in enumerate(actions):
                if action is not None:
                    self._run_action(run, position, action, context)
            self._sends.wait()
        except BaseException:
            self._clear()
            raise
        if self.unshard_ops:
            raise OrderError(
                f"stages {sorted(self.unshard_ops)} were gathered and not used; remove their "
                "UNSHARD, or put it before their first action"
            )

    def _run_action(self, run: "_Run", position: int, action: _Action, context: Any) -> None:
        try:
            # A name that nobody looks at would cost as much as a small layer.
            if torch._C._autograd._profiler_enabled():
                with record_function(_get_profiler_function_name(action)):
                    self._do(run, action, context)
            else:
                self._do(run, action, context)
        except Exception as error:
            error.add_note(f"while running {action}, at position {position} of its rank")
            raise

    def _do(self, run: "_Run", action: _Action, context: Any) -> None:
        custom = self.custom_functions.get(action.computation_type)
        if custom is not None:
            custom(action, context)
        else:
            for member in members(action):
                run.perform(member)

    def _clear(self) -> None:
        for held in (self.fwd_recv_ops, self.bwd_recv_ops, self.unshard_ops):
            held.clear()
        self.unsharded_stages.clear()
        self._sends.clear()
        self._receives.clear()

    def send(self, rank: int, works: list[Any], *, may_wait: bool) -> None:
        """Keep a send going."""
        self._sends.add(rank, works, may_wait=may_wait)

    def post(
        self, peers: frozenset[int], start: Callable[[], list[Any]], known: bool
    ) -> list[Any]:
        """Post a receive, or note it until somebody waits for it."""
        return self._receives.post(peers, start, is_known=known)

    def start_receives(self, rank: int) -> None:
        """Start the receives from a rank that wait until somebody needs them."""
        self._receives.start_from(rank)

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


class _Run:
    """One step: what each kind of action does."""

    def __init__(
        self,
        runner: ActionRunner,
        owner: Owner,
        stages: Mapping[int, _PipelineStageBase],
        batch: StepBatch,
        sends_may_wait: bool,
    ) -> None:
        self._runner = runner
        self._owner = owner
        self._stages = stages
        self._batch = batch
        self._sends_may_wait = sends_may_wait

    def perform(self, action: _Action) -> None:
        """Do what a single action says."""
        stage = self._stages[action.stage_index]
        microbatch = action.microbatch_index
        match action.computation_type:
            case _ComputationType.UNSHARD:
                self._unshard(stage)
            case _ComputationType.RESHARD:
                self._reshard(stage)
            case _ComputationType.REDUCE_GRAD:
                factor = self._owner._n_microbatches if self._owner.scale_grads else 1
                stage.perform_reduce_grad(factor)
            case _ if microbatch is None:
                raise OrderError(f"{action} names no microbatch")
            case computation_type:
                self._perform_on(stage, microbatch, computation_type, action)

    def _perform_on(
        self,
        stage: _PipelineStageBase,
        microbatch: int,
        computation_type: _ComputationType,
        action: _Action,
    ) -> None:
        match computation_type:
            case _ComputationType.FORWARD:
                self._forward(stage, microbatch)
            case _ComputationType.FULL_BACKWARD:
                self._backward(stage, microbatch, is_full=True)
            case _ComputationType.BACKWARD_INPUT:
                self._backward(stage, microbatch, is_full=False)
            case _ComputationType.BACKWARD_WEIGHT:
                self._runner.assert_unsharded(stage)
                last = self._count_backward(stage)
                stage.backward_weight_one_chunk(microbatch, last_backward=last)
            case _ComputationType.SEND_F:
                self._send(stage, partial(stage.get_fwd_send_ops, microbatch), step=1)
            case _ComputationType.SEND_B:
                self._send(stage, partial(stage.get_bwd_send_ops, microbatch), step=-1)
            case _ComputationType.RECV_F:
                self._receive_forward(stage, microbatch)
            case _ComputationType.RECV_B:
                self._receive_backward(stage, microbatch)
            case _:
                raise OrderError(f"{action} is nothing that a stage can do")

    def _unshard(self, stage: _PipelineStageBase) -> None:
        index = stage.stage_index
        if stage.is_sharded:
            if index in self._runner.unsharded_stages or index in self._runner.unshard_ops:
                raise OrderError(f"stage {index} is gathered twice; put a RESHARD between")
            stage.unshard()
            self._runner.unsharded_stages.add(index)

    def _reshard(self, stage: _PipelineStageBase) -> None:
        if stage.is_sharded:
            if stage.stage_index not in self._runner.unsharded_stages:
                raise OrderError(f"stage {stage.stage_index} is let go of, but was not gathered")
            stage.reshard()
            self._runner.unsharded_stages.remove(stage.stage_index)

    def _forward(self, stage: _PipelineStageBase, microbatch: int) -> None:
        index, batch = stage.stage_index, self._batch
        self._runner.assert_unsharded(stage)
        if not stage.is_first and index - 1 not in self._stages:
            self._await(self._runner.fwd_recv_ops, index, microbatch, "RECV_F")
        output = stage.forward_one_chunk(
            microbatch,
            batch.arg_mbs[microbatch],
            batch.kwarg_mbs[microbatch],
            save_forward_output=batch.return_outputs,
        )
        extra = () if batch.loss_kwargs is None else (batch.loss_kwargs,)
        self._owner._maybe_compute_loss(stage, output, batch.target_mbs, microbatch, *extra)
        if index + 1 in self._stages:
            self._stages[index + 1].set_local_fwd_input(output, microbatch)

    def _backward(self, stage: _PipelineStageBase, microbatch: int, *, is_full: bool) -> None:
        index = stage.stage_index
        self._runner.assert_unsharded(stage)
        if not stage.is_last and index + 1 not in self._stages:
            self._await(self._runner.bwd_recv_ops, index, microbatch, "RECV_B")
        loss = self._owner._maybe_get_loss(stage, microbatch)
        last = is_full and self._count_backward(stage)
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=is_full, last_backward=last)
        if stage.has_backward and index - 1 in self._stages:
            gradients = stage.get_local_bwd_output(microbatch)
            self._stages[index - 1].set_local_bwd_input(gradients, microbatch)

    def _count_backward(self, stage: _PipelineStageBase) -> bool:
        """Count a backward that completes the weight gradients; whether it was the last one."""
        self._runner.backward_counter[stage.stage_index] += 1
        done = self._runner.backward_counter[stage.stage_index]
        return done == self._owner._n_microbatches

    def _await(
        self,
        posted: dict[tuple[int, int], list[Any]],
        stage: int,
        microbatch: int,
        text: str,
    ) -> None:
        if (stage, microbatch) not in posted:
            raise OrderError(
                f"stage {stage} uses microbatch {microbatch} before it is received; put "
                f"{stage}{text}{microbatch} before it"
            )
        _wait_batch_p2p(posted.pop((stage, microbatch)))

    def _send(
        self, stage: _PipelineStageBase, find_operations: Callable[[], list[Any]], *, step: int
    ) -> None:
        rank = stage.stage_index_to_group_rank[stage.stage_index + step]
        # Between two devices both directions are one queue, so that all keep their order there.
        if torch.device(stage.device).type != "cpu":
            self._runner.start_receives(rank)
        works = _batch_p2p(find_operations())
        may_wait = self._sends_may_wait and all(s.knows_all for s in self._stages.values())
        self._runner.send(rank, works, may_wait=may_wait)

    def _receive_forward(self, stage: _PipelineStageBase, microbatch: int) -> None:
        start = partial(_start, stage.get_fwd_recv_ops, microbatch)
        ranks = _find_ranks(stage, stage.find_sources())
        works = self._runner.post(ranks, start, stage.knows_inputs)
        _add_once(self._runner.fwd_recv_ops, stage, microbatch, works)

    def _receive_backward(self, stage: _PipelineStageBase, microbatch: int) -> None:
        start = partial(_start, stage.get_bwd_recv_ops, microbatch)
        ranks = _find_ranks(stage, stage.find_destinations())
        works = self._runner.post(ranks, start, stage.knows_gradients(microbatch))
        _add_once(self._runner.bwd_recv_ops, stage, microbatch, works)


def _find_ranks(stage: _PipelineStageBase, stages: Sequence[int]) -> frozenset[int]:
    return frozenset(stage.stage_index_to_group_rank[other] for other in stages)


def _start(find_operations: Callable[[int], list[Any]], microbatch: int) -> list[Any]:
    return _batch_p2p(find_operations(microbatch))


def _add_once(
    posted: dict[tuple[int, int], list[Any]],
    stage: _PipelineStageBase,
    microbatch: int,
    works: list[Any],
) -> None:
    key = stage.stage_index, microbatch
    if key in posted:
        raise OrderError(f"microbatch {microbatch} is received twice for stage {key[0]}")
    posted[key] = works
