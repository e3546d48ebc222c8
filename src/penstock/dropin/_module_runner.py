"""Runs the module of a stage: its data parallelism, and the weight work that it leaves for later.

A trainer may put another module into a stage, or wrap it, at any time between steps; so what is
known of the module is looked up when it runs.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from penstock.runtime.backward import LayerRecorder, Recording, Root, run_backward
from penstock.runtime.replica import Replica, replica_of
from penstock.runtime.replicated import ReplicatedStage
from penstock.runtime.sharded import ShardedStage
from penstock.runtime.weight_work import WeightWork

__all__ = ["ModuleRunner"]


class ModuleRunner:
    """Runs whatever module a stage has now, and holds what its backwards need."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._type: type | None = None
        self._replica: Replica | None = None
        self._recorder: LayerRecorder | None = None
        self._recordings: dict[int, Recording] = {}
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

    def record(self, microbatch: int, module: nn.Module, has_backward: bool) -> "_Recorded":
        """Around a forward whose backward may be split."""
        self.look_at(module)
        if self._splits and self._recorder is None:
            self._recorder = LayerRecorder()
            self._recorder.watch(module)
        recorder = self._recorder if has_backward else None
        return _Recorded(recorder, self._recordings, microbatch)

    def propagate(
        self, microbatch: int, roots: Sequence[Root], leaves: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[WeightWork]]:
        """Send gradients through a microbatch's graph: those of leaves, and work left over."""
        recording = self._recordings.pop(microbatch, None)
        if self._recorder is None or recording is None:
            return run_backward(roots, leaves), []
        return self._recorder.run_backward(recording, roots, leaves)

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
        self._recordings.clear()


class _Recorded:
    """Records a forward, if there is a recorder, under the number of its microbatch."""

    def __init__(
        self, recorder: LayerRecorder | None, recordings: dict[int, Recording], microbatch: int
    ) -> None:
        self._context = nullcontext() if recorder is None else recorder.record()
        self._recordings = recordings
        self._microbatch = microbatch

    def __enter__(self) -> None:
        recording = self._context.__enter__()
        if recording is not None:
            self._recordings[self._microbatch] = recording

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)
