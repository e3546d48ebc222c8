"""How the steps of a pipeline are run: settings that leave its numbers alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from penstock.ir.actions import Kind
from penstock.ranks.fault_injection import FaultInjection
from penstock.step.step_data import Around

__all__ = ["DEFAULT_OPTIONS", "RunOptions", "TransportChoice"]

TransportChoice: TypeAlias = Literal["auto", "peer memory", "nccl"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How steps are run; none of these changes what a step computes.

    - `around`: wrap every action of a kind, as `wrap(action, run)`.
    - `cuda_graphs`: replay stages as CUDA graphs from the second step on, while shapes stay.
    - `find_turning_points`: in overlapped actions, let the other
      action run also while a collective is under way that the model does not mark.
    - `compare_data`: let ranks compare a sample of what they were given for the same argument,
      in the first steps and whenever the form of the batch is new, and refuse what differs.
    - `transport`: what carries messages between ranks on CUDA devices. With "auto" that is peer
      memory between ranks of one machine, which takes nothing from the compute beside it, and NCCL
      elsewhere; "peer memory" is an error where it cannot be used. `Pipeline.routes` says what is.
    - `fault_injection`: for tests, slow down, reorder or cut off what goes between ranks; see
      `penstock.testing.FaultInjection`.

    >>> RunOptions(cuda_graphs=True).compare_data
    True
    """

    around: Mapping[Kind, Around] = field(default_factory=dict)
    cuda_graphs: bool = False
    find_turning_points: bool = True
    compare_data: bool = True
    transport: TransportChoice = "auto"
    fault_injection: FaultInjection | None = None


DEFAULT_OPTIONS = RunOptions()
