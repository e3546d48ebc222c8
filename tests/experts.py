"""A mixture of experts over an ordinary process group, small enough to check by hand."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.step.overlap.communication import Waitable

__all__ = ["EXCHANGES", "Block", "Experts", "Unsplit"]

WIDTH = 6
# What the loss that keeps experts evenly busy counts for.
SHARE = 0.1

# Gives the ranks of a group these numbers of rows, and takes those numbers from them.
Exchange: TypeAlias = Callable[
    [torch.Tensor, Sequence[int], Sequence[int], dist.ProcessGroup], torch.Tensor
]


def begin(
    rows: torch.Tensor, there: Sequence[int], here: Sequence[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, Waitable | None]:
    """Begin an exchange of rows."""
    result = rows.new_empty(sum(here), WIDTH)
    work = dist.all_to_all_single(
        result, rows.contiguous(), list(here), list(there), group=group, async_op=True
    )
    return result, work


def exchange_marked(
    rows: torch.Tensor, there: Sequence[int], here: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange rows where Penstock is told of it."""
    return ps.communicate(
        rows,
        lambda value: begin(value, there, here, group),
        lambda gradient: begin(gradient, here, there, group),
    )


def exchange_functional(
    rows: torch.Tensor, there: Sequence[int], here: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange rows by a functional collective, as torchtitan's experts do."""
    exchanged: torch.Tensor = all_to_all_single_autograd(
        rows.contiguous(), list(here), list(there), group
    )
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        there: Sequence[int],
        here: Sequence[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.there, ctx.here, ctx.group = there, here, group
        result = rows.new_empty(sum(here), WIDTH)
        dist.all_to_all_single(result, rows.contiguous(), list(here), list(there), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange_own(gradient, ctx.here, ctx.there, ctx.group), None, None, None


def exchange_own(
    rows: torch.Tensor, there: Sequence[int], here: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange rows by a function of the model's own, which waits, as Megatron's experts do."""
    result: torch.Tensor = _Exchange.apply(rows, there, here, group)  # type: ignore[no-untyped-call]  # untyped upstream
    return result


EXCHANGES: Mapping[str, Exchange] = {
    "marked": exchange_marked,
    "functional": exchange_functional,
    "own": exchange_own,
}


class Experts(nn.Module):
    """Each row goes to one expert, on whatever rank of the group that is, and comes back.

    Without a group all experts are here.
    """

    def __init__(self, num_experts: int, exchange: str) -> None:
        super().__init__()
        self.group: dist.ProcessGroup | None = None
        self.num_experts, self.exchange = num_experts, exchange
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_experts))

    def local(self, group: dist.ProcessGroup) -> None:
        """Keep only the experts of this rank of a group, with their numbers in names."""
        self.group = group
        own = self.num_experts // group.size()
        first = group.rank() * own
        for number in range(self.num_experts):
            if not first <= number < first + own:
                # The numbers of the others stay as they are, so that names do.
                self.experts[number] = nn.Identity()

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mixed rows, and the loss of the router."""
        shares = self.router(value).softmax(-1)
        weight, chosen = shares.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts)
        mixed = self._visit(value[order], counts)[order.argsort()]
        busy = counts / counts.sum()
        return value + weight[:, None] * mixed, (busy * shares.mean(0)).sum() * SHARE

    def _visit(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send rows, which are sorted by expert, to their experts and back."""
        if self.group is None:
            return self._compute(rows, counts.tolist(), list(range(self.num_experts)))
        sent = counts.view(self.group.size(), -1)
        coming = torch.empty_like(sent)
        dist.all_to_all_single(coming, sent, group=self.group)
        there, here = sent.sum(1).tolist(), coming.sum(1).tolist()
        exchange = EXCHANGES[self.exchange]
        arrived = exchange(rows, there, here, self.group)
        first = self.group.rank() * sent.shape[1]
        numbers = list(range(first, first + sent.shape[1])) * self.group.size()
        computed = self._compute(arrived, coming.flatten().tolist(), numbers)
        return exchange(computed, here, there, self.group)

    def _compute(
        self, rows: torch.Tensor, counts: Sequence[int], experts: Sequence[int]
    ) -> torch.Tensor:
        parts = torch.split(rows, list(counts))
        return torch.cat(
            [torch.tanh(self.experts[e](part)) for e, part in zip(experts, parts, strict=True)]
        )


class Block(nn.Module):
    """Rows through a layer and experts; the router's loss is added to that of the step."""

    def __init__(
        self, num_experts: int, *, is_checkpointed: bool = False, exchange: str = "marked"
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(num_experts, exchange)
        self.is_checkpointed = is_checkpointed

    def mix(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the loss of the router."""
        found: tuple[torch.Tensor, torch.Tensor] = self.experts(torch.tanh(self.layer(value)))
        return found

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        found: tuple[torch.Tensor, torch.Tensor]
        if self.is_checkpointed:
            found = checkpoint(self.mix, value, use_reentrant=False)
        else:
            found = self.mix(value)
        output, loss = found
        ps.add_loss(loss)
        return output


class Unsplit:
    """The whole model in one process: what all ranks together must arrive at."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks

    def loss(self, batch: torch.Tensor, target: torch.Tensor, microbatches: int) -> torch.Tensor:
        """Return the loss of one rank's batch; routers see a microbatch at a time."""
        total = torch.zeros((), dtype=batch.dtype)
        parts = zip(
            batch.tensor_split(microbatches), target.tensor_split(microbatches), strict=True
        )
        for rows, wanted in parts:
            share = len(rows) / len(batch)
            for block in self._blocks:
                rows, router_loss = block.mix(rows)  # one layer after another
                total = total + share * router_loss
            total = total + share * nn.functional.mse_loss(rows, wanted)
        return total
