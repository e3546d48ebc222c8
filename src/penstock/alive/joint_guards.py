"""The guards of what the processes of a pipeline do together, alone or with others.

Replicas are watched by the guard of their pipelines. Other processes, which save checkpoints
together without being replicas, watch one another from their first joint call on.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch.distributed as dist

from penstock.alive.guard import Guard
from penstock.alive.guard_opening import open_guard
from penstock.alive.timeouts import Timeouts

__all__ = ["JointGuards"]


class JointGuards:
    """The guard of a pipeline, and those of larger groups, opened when first needed."""

    def __init__(self, own: Guard, timeouts: Timeouts) -> None:
        self.own, self._timeouts = own, timeouts
        self._wider: dict[tuple[int, ...], Guard] = {}

    def call(
        self, abort: Callable[[], None], group: dist.ProcessGroup | None = None
    ) -> AbstractContextManager[None]:
        """Guard a call of this pipeline's processes, or of all processes of a group."""
        if group is None:
            return self.own.call(abort)
        ranks = tuple(dist.get_process_group_ranks(group))
        if self.own.watched.issuperset(ranks):
            return self.own.call(abort, is_shared=not self.own.ranks.issuperset(ranks))
        if ranks not in self._wider:
            self._wider[ranks] = open_guard(group, (), self._timeouts)
        return self._wider[ranks].call(abort)

    def close(self) -> None:
        """Leave the other processes, which do not wait for this one any more."""
        for guard in (*self._wider.values(), self.own):
            guard.close()
