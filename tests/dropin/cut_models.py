"""Models to be cut, marked so that torch's tracer and ours both see it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx, nn

from penstock.splitting.marks import SplitPoint

__all__ = ["CASES", "SIZE", "Case", "Skipping", "mark", "torch_ir"]

torch_ir: Any = pytest.importorskip("torch.distributed.pipelining._IR")
mark: Callable[[], None] = torch_ir.pipe_split
SIZE = 6


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self.act(self.up(x)))
        return output


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Mlp() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


class Marked(nn.Module):
    """Two marks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Mlp(), Mlp(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        mark()
        x = self.second(x)
        mark()
        output: torch.Tensor = self.third(x)
        return output


class Skipping(nn.Module):
    """A parameter that two stages use, a value that skips one, and one without gradient."""

    constant: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.randn(SIZE, SIZE))
        self.own = nn.Parameter(torch.randn(SIZE, SIZE))
        self.middle, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("constant", torch.randn(SIZE))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        skip = x @ self.shared
        x = torch.relu(skip + y)
        constant = self.constant.clone()
        mark()
        x = self.middle(x @ self.shared)
        mark()
        x = (torch.relu(x) + skip) @ self.own + constant
        mark()
        return torch.relu(self.last(x))


class Late(nn.Module):
    """An argument that only the last stage uses, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        mark()
        x = self.second(x) * scale
        return x * 2, x


class Keywords(nn.Module):
    """Arguments of which some are given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x) + bias
        mark()
        return {"output": self.second(x), "input": x * 2}


class Normed(nn.Module):
    """Statistics that are updated while training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        mark()
        output: torch.Tensor = self.last(x)
        return output


def mark_linears(traced: fx.GraphModule) -> fx.GraphModule:
    """Start a new stage before every other linear layer but the first: a policy."""
    linears = [n for n in traced.graph.nodes if n.target is torch.ops.aten.linear.default]
    for node in linears[2::2]:
        with traced.graph.inserting_before(node):
            traced.graph.call_function(torch_ir.aten_pipe_split_alias)
    traced.recompile()
    return traced


@dataclass(frozen=True)
class Case:
    """A model with an example of its arguments, and where to cut it."""

    model: type[nn.Module]
    num_inputs: int = 1
    keywords: tuple[str, ...] = ()
    spec: dict[str, str] = field(default_factory=dict)
    policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model().double()

    def example(self, rows: int = 3) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(rows)
        names = [*range(self.num_inputs), *self.keywords]
        made = [torch.randn(rows, SIZE, dtype=torch.float64, generator=generator) for _ in names]
        given = dict(zip(self.keywords, made[self.num_inputs :], strict=True))
        return tuple(made[: self.num_inputs]), given

    def cut(self, package: Any, model: nn.Module, point: Any = SplitPoint) -> Any:
        """Return the pipe that a package makes of the model."""
        args, kwargs = self.example()
        spec = {path: point[side] for path, side in self.spec.items()} or None
        with warnings.catch_warnings():
            if package is torch_ir:
                warnings.simplefilter("ignore")
            return package.pipeline(model, args, kwargs, split_spec=spec, split_policy=self.policy)


CASES = {
    "marks": Case(Marked),
    "beginning": Case(Layers, spec={"layers.1": "BEGINNING", "layers.3": "BEGINNING"}),
    "end": Case(Layers, spec={"layers.0": "END", "layers.2": "END"}),
    "inside": Case(Layers, spec={"layers.1.down": "BEGINNING"}),
    "marks and spec": Case(Marked, spec={"second.down": "BEGINNING"}),
    "policy": Case(Layers, policy=mark_linears),
    "skip": Case(Skipping, num_inputs=2),
    "late argument": Case(Late, num_inputs=2),
    "keywords": Case(Keywords, keywords=("bias",)),
    "statistics": Case(Normed),
    "no marks": Case(Layers),
}
