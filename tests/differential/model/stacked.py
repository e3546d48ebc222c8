"""A model with a list of layers, as Penstock splits it by itself."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from tests.differential.case import CLASSES, WIDTH, Case
from tests.differential.model.blocks import WrappedBlock
from tests.differential.model.parts import find_tensor, finish, make_entry

__all__ = ["Stacked"]


class Stacked(nn.Module):
    """The blocks of all parts in one list; what a skip takes is kept and added later."""

    def __init__(self, case: Case, output: str) -> None:
        super().__init__()
        self.entry = make_entry(case.inputs)
        self.layers = nn.ModuleList(WrappedBlock(block) for block in case.blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        # The number of the first layer of each part, and of the one behind the last.
        bounds = [0, *accumulate(len(part.blocks) for part in case.parts)]
        self._kept = {bounds[a + 1]: a for a, _ in case.skips}
        self._added: Mapping[int, Sequence[int]] = {
            bounds[b]: [a for a, other in case.skips if other == b] for _, b in case.skips
        }
        self._last = bounds[-2]
        self._output = output
        self._bounds = bounds

    def forward(self, given: Any, scale: Any = None, gain: Any = None) -> Any:
        h: torch.Tensor = self.entry(find_tensor(given))
        if scale is not None:
            h = h * scale.view(-1, *[1] * (h.dim() - 1))
        if gain is not None:
            h = h * gain
        hidden, kept = h, {}
        for number, layer in enumerate(self.layers):
            if number in self._kept:
                kept[self._kept[number]] = h
            for part in self._added.get(number, ()):
                h = h + 0.5 * kept[part]
            if number == self._last:
                # A tensor without the hooks of the layer before, which another stage may hold.
                h = hidden = 0.95 * h
            h = layer(h)
        return finish(self._output, hidden, self.head(h), None)

    def part(self, number: int) -> nn.ModuleDict:
        """The modules of one part."""
        start, end = self._bounds[number : number + 2]
        modules: dict[str, nn.Module] = {} if number else {"entry": self.entry}
        modules |= {str(n): self.layers[n] for n in range(start, end)}
        if end == len(self.layers):
            modules["head"] = self.head
        return nn.ModuleDict(modules)
