"""What goes into a step on one process, and what comes out of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from penstock.ir.actions import Action
from penstock.loss.weigher import Weigher
from penstock.step.outputs import KeptOutput

__all__ = ["Around", "KeptLoss", "LossFunction", "Microbatches", "Results", "StepRecording"]

# A function of the user's that wraps every action of a kind; it gets the action and its call.
Around: TypeAlias = Callable[[Action, Callable[[], None]], None]
LossFunction: TypeAlias = Callable[..., torch.Tensor | None]
# The number of a loss: known to the host, or on a device that the host does not wait for.
KeptLoss: TypeAlias = torch.Tensor | float


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The batch of a step in the form that stages take, one item per microbatch."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Mapping[int, Sequence[dict[str, Any]]]
    targets: Sequence[Any]
    weigher: Weigher
    row_weights: Sequence[float]
    gradient_scale: float = 1.0
    keeps_outputs: bool = False


@dataclass(slots=True)
class Results:
    """The losses of a step on this process with their weights, and the outputs that are kept.

    The losses are those of the microbatches and those that stages add.
    """

    losses: list[tuple[KeptLoss, float]] = field(default_factory=list)
    outputs: dict[int, KeptOutput] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecording:
    """The rows that this process ran: when each started and ended, and the bytes in use then.

    A message has a direction (forward or not), an edge of the dataflow and a microbatch. `waits`
    has those that were waited for, from when to when, and `arrivals` those sent, and when they
    reached their rank, as far as the sender can say. All seconds count from `began`, which is on
    the clock of the `machine`, if that has a name.
    """

    row: list[int]
    start: list[float]
    end: list[float]
    memory: list[float]
    waits: list[tuple[bool, int, int, float, float]] = field(default_factory=list)
    arrivals: list[tuple[bool, int, int, float]] = field(default_factory=list)
    began: float = 0.0
    machine: str = ""
