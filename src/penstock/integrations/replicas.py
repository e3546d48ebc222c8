"""What ranks share with those that hold the same stages in other replicas, call by call."""

import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.integrations.layout import Layout
from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.control import Control, open_control
from penstock.training.pipeline import Pipeline

__all__ = ["Replicas"]


class Replicas:
    """The ranks of all replicas that hold the stages of this one.

    They share what they do, so that none waits for another that does something else.
    """

    def __init__(self, layout: Layout, pipeline: Pipeline) -> None:
        self._group: dist.ProcessGroup | None = None
        if layout.mesh is not None and layout.replicas > 1:
            self._group = layout.mesh.get_group("replica")
        self._pipeline = pipeline
        self._connections = Connections()
        self._control: Control | None = None

    def gather(self, doing: str, number: float = 0.0) -> list[float]:
        """Return the numbers that all replicas give, in their order, if all do the same."""
        if self._group is None:
            return [number]
        with self._pipeline.guarded(self._connections.abort, group=self._group):
            if self._control is None:
                self._control = open_control(self._group, self._connections)
            found = self._control.gather([doing, number])
        if any(other != doing for other, _ in found):
            raise PipelineError(
                "replicas must differentiate the losses of the same calls (got "
                f"{', '.join(f'{what} in replica {i}' for i, (what, _) in enumerate(found))}); "
                "let all of them call backward, or none"
            )
        return [other for _, other in found]
