"""Runs the module of a stage: its data parallelism, and the weight work that it leaves for later.

A trainer may put another module into a stage, or wrap it, at any time between steps; so what is
known of the module is looked up when it runs.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from penstock.deferred.work import DeferredWork
from penstock.parallel.ddp import ReplicatedStage
from penstock.parallel.fsdp import ShardedStage
from penstock.parallel.replica import Replica, replica_of
from penstock.step.backward import LayerRecorder, Root, run_backward

__all__ = ["ModuleRunner"]


class ModuleRunner:
    """Runs whatever module a stage has now, and holds what its backwards need."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._type: type | None = None
        self._replica: Replica | None = None
        self._recorder: LayerRecorder | None = None
        # The microbatches whose forwards were recorded.
        self._recorded: set[int] = set()
        self._splits = False
        self._is_reduced = True

    def look_at(self, module: nn.Module) -> Replica:
        """How this module is data-parallel; `fully_shard` changes the type of a module."""
        if self._replica is None or self._module is not module or self._type is not type(module):
            self._module, self._type = module, type(module)
            self._replica = replica_of(module)
            self._recorder = None
        return self._replica

    def is_sharded(self, module: nn.Module) -> bool:
        """Whether parameters have to be gathered before this module runs."""
        return isinstance(self.look_at(module), ShardedStage)

    def begin_step(self, module: nn.Module) -> None:
        """Before the first forward of a training step."""
        self.clear()
        self.look_at(module).begin_step()
        self._is_reduced = False

    def call(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the module, without a reduction of gradients in its backward."""
        with self.look_at(module).forward_context():
            return module(*args, **kwargs)

    def record(
        self, microbatch: int, module: nn.Module, has_backward: bool
    ) -> AbstractContextManager[None]:
        """Around a forward whose backward may be split."""
        self.look_at(module)
        if self._splits and self._recorder is None:
            self._recorder = LayerRecorder()
            self._recorder.watch(module)
        if self._recorder is None or not has_backward:
            return nullcontext()
        self._recorded.add(microbatch)
        return self._recorder.record()

    def propagate(
        self, microbatch: int, roots: Sequence[Root], leaves: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[DeferredWork]]:
        """Send gradients through a microbatch's graph: those of leaves, and work left over."""
        if self._recorder is None or microbatch not in self._recorded:
            return run_backward(roots, leaves), []
        self._recorded.remove(microbatch)
        return self._recorder.run_backward(roots, leaves)

    def expect_halves(self) -> None:
        """From now on record forwards, for their backwards are split."""
        self._splits = True

    def end_backward(self, module: nn.Module) -> None:
        """After the last backward of a step: let copies agree."""
        replica = self.look_at(module)
        if isinstance(replica, ReplicatedStage) and not self._is_reduced:
            replica.reduce_gradients()
            self._is_reduced = True

    def reduce_gradients(self, module: nn.Module) -> None:
        """Average this step's gradients, and let go of gathered parameters."""
        self.end_backward(module)
        replica = self.look_at(module)
        if not self._is_reduced:
            replica.reduce_gradients()
            replica.reshard()
            self._is_reduced = True

    def clear(self) -> None:
        """Let go of what microbatches have left."""
        self._recorded.clear()
