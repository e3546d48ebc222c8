"""Parameters that several stages share: their gradients are summed over the ranks that hold them.

Ties are found by identity among the modules of all stages, as in a model whose head is its
embedding, or in a schedule that runs two copies of every part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.ir.placement import Placement

__all__ = ["Tie", "TieKeeper", "find_ties"]


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter and the ranks whose stages use it."""

    parameter: nn.Parameter
    ranks: tuple[int, ...]


def find_ties(stages: Sequence[nn.Module], placement: Placement) -> list[Tie]:
    """The parameters that stages on more than one rank share, in the order of the stages."""
    holders: dict[nn.Parameter, set[int]] = {}
    for stage, module in enumerate(stages):
        for parameter in module.parameters():
            holders.setdefault(parameter, set()).add(placement.rank_of_stage[stage])
    return [
        Tie(parameter, tuple(sorted(ranks)))
        for parameter, ranks in holders.items()
        if len(ranks) > 1
    ]


class TieKeeper:
    """Keeps the gradients of tied parameters equal on all ranks that hold them."""

    def __init__(self, ties: Sequence[Tie], rank: int, members: Sequence[int]) -> None:
        groups = {
            ranks: dist.new_group([members[r] for r in ranks], use_local_synchronization=True)
            for ranks in sorted({tie.ranks for tie in ties})
            if rank in ranks
        }
        self._ties = [(tie.parameter, groups[tie.ranks]) for tie in ties if rank in tie.ranks]
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self.counted_elsewhere = frozenset(
            tie.parameter for tie in ties if rank in tie.ranks and rank != tie.ranks[0]
        )

    def begin_step(self) -> None:
        """Put away what the gradients held before, so that only this step's part is summed."""
        for parameter, _ in self._ties:
            if parameter.grad is not None:
                self._before[parameter] = parameter.grad
                parameter.grad = None

    def end_step(self) -> None:
        """Sum this step's gradients over the ranks, and add what was there before."""
        for parameter, group in self._ties:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(_local(parameter.grad), group=group)
            if parameter in self._before:
                parameter.grad = self._before[parameter].add_(parameter.grad)
        self._before.clear()

    def abandon_step(self) -> None:
        """Take back what the gradients held before a step that failed."""
        for parameter, before in self._before.items():
            parameter.grad = before
        self._before.clear()


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """The memory of a gradient on this rank."""
    local: torch.Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local
