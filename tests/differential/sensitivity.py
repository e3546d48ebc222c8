"""How far the plain model itself is determined: what a nudge of a few roundings does to it.

A pipeline adds numbers in another order than the plain model, which is as if every input and
parameter were off by a rounding or two. Almost everywhere that changes the last digits of a
result. It changes more where a gradient is what is left of terms that cancel (behind the norm of
a constant row), and everything where training has diverged or steps over the edge of a look-up.
The plain model alone says where that is, so that a wrong pipeline cannot excuse itself.
"""

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from tests.differential.case import Case
from tests.differential.observed import Numbers
from tests.differential.running import run_unsplit

__all__ = ["Nudge", "spread_of"]

_RUNS = 6
_ROUNDINGS = 4


class Nudge:
    """Random changes of the last digits, the same for the same number."""

    def __init__(self, number: int) -> None:
        self._generator = torch.Generator().manual_seed(number)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor whose numbers are a few roundings away."""
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor
        share = 2 * torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64) - 1
        moved = tensor.detach() * (1 + _ROUNDINGS * torch.finfo(tensor.dtype).eps * share)
        return moved.to(tensor.dtype).requires_grad_(tensor.requires_grad)

    def move_parameters(self, *modules: object) -> None:
        """Change the parameters of modules in place."""
        for module in modules:
            for parameter in module.parameters() if isinstance(module, nn.Module) else ():
                if not isinstance(parameter, UninitializedParameter):
                    with torch.no_grad():
                        parameter.copy_(self.move(parameter))


def spread_of(case: Case, expected: Numbers) -> dict[str, float]:
    """How far each number of the plain model moves, at most, when its inputs are nudged."""
    spread = dict.fromkeys(expected, 0.0)
    for number in range(_RUNS):
        nudged = run_unsplit(case, Nudge(number))
        for name, value in expected.items():
            spread[name] = max(spread[name], _distance(nudged.get(name), value))
    return spread


def _distance(nudged: torch.Tensor | None, value: torch.Tensor | None) -> float:
    """The largest difference; a number that is finite in only one of the two moves without end."""
    if nudged is None or value is None or nudged.shape != value.shape or not value.numel():
        return 0.0
    difference = (nudged - value).abs().double()
    has_diverged = ~nudged.isfinite() & ~value.isfinite()
    return float(difference.where(~has_diverged, 0).nan_to_num(nan=torch.inf).max())
