"""How the steps of a pipeline are run: settings that leave its numbers alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.ir.actions import Kind
from penstock.ranks.fault_injection import FaultInjection
from penstock.step.step_data import Around

__all__ = ["DEFAULT_OPTIONS", "RunOptions"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How steps are run; none of these changes what a step computes.

    - `around`: wrap every action of a kind, as `wrap(action, run)`.
    - `cuda_graphs`: replay stages as CUDA graphs from the second step on, while shapes stay.
    - `compare_data`: let ranks compare a sample of what they were given for the same argument,
      in the first steps and whenever the form of the batch is new, and refuse what differs.
    - `fault_injection`: for tests, slow down, reorder or cut off what goes between ranks; see
      `penstock.testing.FaultInjection`.

    >>> RunOptions(cuda_graphs=True).compare_data
    True
    """

    around: Mapping[Kind, Around] = field(default_factory=dict)
    cuda_graphs: bool = False
    compare_data: bool = True
    fault_injection: FaultInjection | None = None


DEFAULT_OPTIONS = RunOptions()
