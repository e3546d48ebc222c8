"""Data parallelism of a stage: which kind it has (FSDP2, DDP or none), and what the step calls.

The pipeline decides when parameters are gathered and when gradients are reduced. Microbatches
only add to the gradients; REDUCE_GRAD averages them, once per step:

    begin_step   F0 F1 B0 B1 ...   reduce_gradients
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

from penstock.errors import PipelineError
from penstock.parallel.ddp import ReplicatedStage, find_copies
from penstock.parallel.fsdp import ShardedStage

__all__ = ["Replica", "replica_of"]


class Replica(Protocol):
    """Data parallelism, as a stage uses it."""

    @property
    def is_alone(self) -> bool:
        """Whether there is just one copy of the stage, and it is whole."""

    def begin_step(self) -> None:
        """Prepare; called before the first forward of a training step."""

    def forward_context(self) -> AbstractContextManager[None]:
        """Return a context for every forward of a training step."""

    def unshard(self) -> None:
        """Gather the parameters."""

    def reshard(self) -> None:
        """Free the gathered parameters."""

    def reduce_gradients(self) -> None:
        """Average this step's gradients over the data-parallel ranks."""

    def abandon_step(self) -> None:
        """Clean up after a step that failed."""


def replica_of(module: nn.Module) -> Replica:
    """Return the data parallelism of a module or of its children."""
    copies = find_copies(module)
    shards = [child for child in module.modules() if isinstance(child, FSDPModule)]
    if copies and shards:
        raise PipelineError(
            "a stage must have one kind of data parallelism (got both DistributedDataParallel and "
            "fully_shard); use fully_shard with a mesh of two dimensions to shard and replicate"
        )
    if copies:
        return ReplicatedStage(copies)
    return ShardedStage(shards) if shards else _Alone()


class _Alone:
    """One copy of the stage, whole all the time."""

    is_alone = True

    def begin_step(self) -> None:
        pass

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def unshard(self) -> None:
        pass

    def reshard(self) -> None:
        pass

    def reduce_gradients(self) -> None:
        pass

    def abandon_step(self) -> None:
        pass
