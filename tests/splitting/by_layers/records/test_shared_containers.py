"""Layers that write to dicts and lists among their arguments, which later layers read."""

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.splitting.by_layers.records.shared_containers import (
    contents_of,
    returned_by,
    write_entries,
)
from tests.splitting.checking import assert_same_gradients
from tests.splitting.small import WIDTH, Block, numbers


class Writing(Block):
    """Keeps what it computes under its number, and reads what the second before it has kept."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor, shared: Any = None, *_: object) -> torch.Tensor:
        y = super().forward(x)
        if isinstance(shared, list):
            y = y + (shared[-2] if len(shared) > 1 else 0)
            shared.append(y * 2)
        else:
            y = y + (shared[self.number - 2] if self.number > 1 else 0)
            shared[self.number] = y * 2
        return y


class Sharing(nn.Module):
    """A model in which layers share values by a container."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Writing, range(4)))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.kind()
        for layer in self.layers:
            x = layer(x, shared=shared)
        return x + (shared[1] if isinstance(shared, list) or 1 in shared else 0)


@pytest.mark.parametrize("kind", [dict, UserDict, list])
def test_what_layers_write_to_a_container_reaches_later_stages(kind: type) -> None:
    # Keys and values that layers share (Gemma 3n, Gemma 4) had once to be on one stage.
    torch.manual_seed(0)
    model, x = Sharing(kind), numbers(8, WIDTH)
    pipe = ps.split(model, layers="layers", stages=4, example=[x])
    assert_same_gradients(model, pipe, (x,))


def test_entries_are_those_that_are_new_or_replaced() -> None:
    same, other = torch.ones(1), torch.zeros(1)
    table, items = {"same": same, "old": same}, [same]
    given = (items, 3), {"table": table}
    before = contents_of(given)
    table["old"] = table["new"] = other
    items.append(other)
    returned = returned_by("output", before, given)
    assert returned.entries == {"table": {"old": other, "new": other}, "0": {1: other}}
    there: Any = ([same], 3), {"table": UserDict(same=same)}
    assert write_entries(returned, there) == "output"
    assert there == (([same, other], 3), {"table": UserDict(same=same, old=other, new=other)})
