"""Blocks with what users write by hand: functions, buffers, in-place, complex, inner gradients."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from tests.differential.case import WIDTH

__all__ = ["ODDITIES"]


class _Product(torch.autograd.Function):
    """A linear layer by hand."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h, weight)
        return h @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ h.flatten(0, -2)


class _Reversed(torch.autograd.Function):
    """Turns gradients round, as adversarial training does."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return -0.5 * gradient


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Product.apply(h, self.weight)  # type: ignore[no-untyped-call]  # untyped upstream
        return made


class Reversal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Reversed.apply(self.layer(h))  # type: ignore[no-untyped-call]  # untyped upstream
        return made


class Counter(nn.Module):
    """Counts rows and calls, and sums what it saw."""

    rows: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.rows += h.shape[0]
            self.seen = self.seen + h.flatten(0, -2).sum(0)
        made: torch.Tensor = self.layer(h)
        return made


class InPlace(nn.Module):
    """Writes to activations in every way that the plain model allows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.first(h)
        made.mul_(0.7).add_(0.1)
        made[..., 0] = 0.5 * made[..., 1]
        made = self.second(F.relu(made, inplace=True) + 0.1 * h)
        made.view(-1, WIDTH)[:, 1:].mul_(0.9)
        return made


class Complex(nn.Module):
    """A product with a complex weight, and its conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        wave = torch.complex(h, torch.tanh(h)) @ self.weight
        power = (wave * wave.conj()).real
        return wave.conj().real + (power + 0.1).sqrt() - 0.5 * wave.conj().imag


class Branches(nn.Module):
    """Several paths, one of which is left out where few rows come."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        first, second = self.first(h), self.second(h)
        kept: torch.Tensor = torch.cat([first[..., :1], second[..., 1:]], -1)
        return kept + torch.where(h > 0, first, second)


class InnerGradient(nn.Module):
    """A force: the derivative of an energy, which is differentiated again in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            place = h if h.requires_grad else h.detach().requires_grad_()
            energy = torch.tanh(self.layer(place)).sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return h - 0.5 * force


class Functional(nn.Module):
    """A layer that is called with other weights than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.factor = nn.Parameter(torch.full((), 0.8))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        weights = {"weight": self.layer.weight * self.factor, "bias": self.layer.bias}
        made: torch.Tensor = torch.func.functional_call(self.layer, weights, (h,))
        return made


class Listed(nn.Module):
    """Weights in a list, mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 2 for _ in range(2)])
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        gates = torch.softmax(self.gate(h), -1)
        made = [F.linear(h, w) * gates[..., i : i + 1] for i, w in enumerate(self.weights)]
        return torch.stack(made).sum(0)


class Experts(nn.Module):
    """Each row goes to the expert that its numbers say; some experts get no row."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        rows = h.reshape(-1, WIDTH)
        chosen = (rows.detach().sum(-1).abs() * 3).long() % 3
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == number)
            made = made.index_add(0, places, expert(rows[places]))
        return made.view_as(h)


class Detached(nn.Module):
    """A path without gradients beside one with, and a straight-through estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(h)
        again: torch.Tensor = self.layer(h.detach())
        return made + (torch.sign(made) - made).detach() * 0.1 + again


class Lazy(nn.Module):
    """A layer that learns its width from its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _KnownLazyLinear(WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(h)
        return made


class _KnownLazyLinear(nn.LazyLinear):
    """Starts with the same numbers wherever and whenever it is first called."""

    def reset_parameters(self) -> None:
        # The first call comes from the constructor, where there are no weights yet.
        if self.in_features:
            with torch.no_grad():
                numbers = torch.linspace(-0.5, 0.6, self.weight.numel())
                self.weight.copy_(numbers.view_as(self.weight))
                self.bias.fill_(0.1)


ODDITIES: dict[str, type[nn.Module]] = {
    "custom_function": CustomFunction,
    "reversal": Reversal,
    "counter": Counter,
    "in_place": InPlace,
    "complex": Complex,
    "branches": Branches,
    "inner_gradient": InnerGradient,
    "functional_call": Functional,
    "listed": Listed,
    "experts": Experts,
    "detached": Detached,
    "lazy": Lazy,
}
