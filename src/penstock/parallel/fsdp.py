"""Stages sharded by FSDP2: gathered and resharded where the schedule says."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.distributed.fsdp import FSDPModule, UnshardHandle

from penstock.torch_private import ReplicateModule

__all__ = ["ShardedStage"]


class ShardedStage:
    """A stage with FSDP2: gathered and resharded where the schedule says, reduced once per step.

    FSDP's own hooks still run in every microbatch, but have nothing to do: parameters are already
    gathered when a module needs them and stay so, and gradients are only accumulated.
    """

    is_alone = False

    def __init__(self, shards: Sequence[FSDPModule]) -> None:
        self._shards = shards
        self._gathers: list[UnshardHandle] = []
        for shard in shards:
            shard.set_reshard_after_backward(False, recurse=False)
            # A replicated module (`replicate` on top of FSDP) is never sharded.
            if not isinstance(shard, ReplicateModule):
                shard.set_reshard_after_forward(False, recurse=False)
        self._set_last_backward(False)

    def _set_last_backward(self, is_last: bool) -> None:
        for shard in self._shards:
            shard.set_requires_gradient_sync(is_last, recurse=False)
            shard.set_is_last_backward(is_last)

    def begin_step(self) -> None:
        """Do nothing: FSDP adds what it reduces to the gradients."""

    def forward_context(self) -> AbstractContextManager[None]:
        """Do nothing: FSDP was configured when the stage was built."""
        return nullcontext()

    def unshard(self) -> None:
        """Start to gather; each module waits for its own parameters when it runs."""
        for shard in self._shards:
            gather = shard.unshard(async_op=True)
            assert gather is not None, "an asynchronous gather returns a handle"
            self._gathers.append(gather)

    def reshard(self) -> None:
        """Free the gathered parameters, also those that no module has waited for."""
        for gather in self._gathers:
            gather.wait()
        self._gathers.clear()
        for shard in self._shards:
            shard.reshard()

    def reduce_gradients(self) -> None:
        """Do what FSDP does after a last backward; no autograd hook knows which one that is."""
        self._set_last_backward(True)
        states = self._states()
        # Before torch 2.12, the callback leaves out what a hook of the last backward has ended,
        # which was when nothing was to be reduced yet. A second call has nothing left to reduce.
        for group in (group for state in states for group in _parameter_groups(state)):
            group.post_backward()
        for state in states:
            # A module that has never run has not been assigned a root yet.
            if state._is_root:
                state._root_post_backward_final_callback()
        self._set_last_backward(False)

    def _states(self) -> list[Any]:
        """Return the state that FSDP keeps for each module; several modules may share one."""
        return list(
            {id(s): s for s in (shard._get_fsdp_state() for shard in self._shards)}.values()
        )

    def abandon_step(self) -> None:
        """Free the gathered parameters, and drop gradients that were not reduced."""
        self.reshard()
        for state in self._states():
            for group in _parameter_groups(state):
                for sharded in group.fsdp_params:
                    sharded.unsharded_accumulated_grad = None
                    if hasattr(sharded, "_unsharded_param"):
                        sharded._unsharded_param.grad = None


def _parameter_groups(state: Any) -> list[Any]:
    """Return the parameter groups of one FSDP module; at most one before torch 2.12."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
