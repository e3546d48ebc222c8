"""Small models with one trait each, to be split by layers."""

from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = [
    "WIDTH",
    "Block",
    "Chain",
    "numbers",
]

WIDTH = 6


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same numbers every time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Block(nn.Module):
    """One layer of width WIDTH; may take a second value and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(
        self, x: torch.Tensor, other: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        y = torch.tanh(self.linear(x)) * scale
        return x + (y if other is None else y + other)


class Chain(nn.Module):
    """An embedding, layers and a head, as most models are."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


class Skips(nn.Module):
    """Like a U-net: what the first layers return goes to the last ones, in reverse."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2 * depth))
        self.depth = depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.layers[: self.depth]:
            x = layer(x)
            kept.append(x)
        for layer in self.layers[self.depth :]:
            x = layer(x, kept.pop())
        return x


class Everywhere(nn.Module):
    """What comes before the layers is needed by all of them."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.context = Block()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = self.context(x)
        for layer in self.layers:
            x = layer(x, context)
        return x


class Token(nn.Module):
    """A parameter beside the layers, used before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(numbers(WIDTH, seed=1))
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.token
        for layer in self.layers:
            x = layer(x, self.token)
        return x * self.token


class Counting(nn.Module):
    """Buffers that the model itself writes to: by a number, by a value, by a new tensor."""

    calls: torch.Tensor
    steps: torch.Tensor
    average: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("scale", torch.full((), 0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.steps = self.steps + 1
        for number, layer in enumerate(self.layers):
            x = layer(x * self.scale)
            if number == 1:
                x = self.norm(x)
                self.average.mul_(0.9).add_(x.detach().mean(0))
        return x


class Repeated(nn.Module):
    """One layer that is in the list several times."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.layers = nn.ModuleList([shared, Block(), shared, shared])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Swapped(nn.Module):
    """Modules that are registered after what they come before, and before what they come after."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.embed = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


class Reversed(nn.Module):
    """A model that calls its layers from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Norms(nn.Module):
    """Lists beside the layers, of which each layer uses one; nobody calls them as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, dtype=torch.float64) for _ in range(4))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.gains = nn.ParameterList(numbers(WIDTH, seed=i) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer, gain in zip(self.norms, self.layers, self.gains, strict=True):
            x = layer(norm(x)) * gain
        return x


class TiedByHand(nn.Module):
    """Ends with the weight of its embedding, without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.embed.weight)


class Parts(nn.Module):
    """Calls a part of one of its modules, and a method of another, besides the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Block(), Block())
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.tail = Tail()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem[0](self.stem(x))
        for layer in self.layers:
            x = layer(x)
        x = self.tail.shift(self.tail(x))
        return x * self.tail.gain


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.shape = WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner.linear(x) + self.shape
        return result

    @property
    def gain(self) -> float:
        return self.shape / 2

    @property
    def extra_state(self) -> list[int]:
        return [self.shape]

    @staticmethod
    def doubled(number: int) -> int:
        return 2 * number


class Nested(nn.Module):
    """Takes and returns trees; uses some inputs late, and some never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(
        self,
        x: torch.Tensor,
        extra: dict[str, Any],
        *,
        mask: torch.Tensor | None = None,
        scale: float = 1.0,
        unused: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        del unused
        for number, layer in enumerate(self.layers):
            x = layer(x, extra["late"][0] if number == 3 else None, scale=scale)
        if mask is not None:
            x = x * mask
        return {"out": x, "pair": (x.mean(), None), "scale": scale}


class Deciding(nn.Module):
    """A model that branches on values: of an input, and of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, switch: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        if switch.any():
            x = x * 2
        rows = (x.detach().sum(1) > 0).nonzero()
        if len(rows) and x.detach().sum() > 1e6:
            x = x * 3
        result: torch.Tensor = self.layers[3](self.layers[2](x))
        return result


class Inside(nn.Module):
    """A module that is used alone and is also a part of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Sequential(self.norm, Block()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = x + self.norm(x)
        return result


class Aliased(nn.Module):
    """A model that has the module with its layers under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Token()
        self.body = self.trunk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


class Views(nn.Module):
    """Gathers values by writing into views of a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_zeros(len(x), 4, WIDTH)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            row = gathered[:, number]
            row.add_(x)
        return gathered.sum(1)


class SideOutput(nn.Module):
    """A model that uses side outputs of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeper() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        kept: list[Any] = [layer.kept for layer in self.layers]
        return x + torch.stack([value for value in kept if value is not None]).sum(0)


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        self.kept = y * 2
        return y


class Pair(NamedTuple):
    """A tree that a layer may return, but that cannot be sent to another stage."""

    first: torch.Tensor
    second: torch.Tensor


class Sharing(nn.Module):
    """A model with two layers that share a value inside of an opaque object."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Giver(), Taker(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = Opaque()
        for layer in self.layers:
            x = layer(x, shared) if isinstance(layer, Giver | Taker) else layer(x)
        return x


class Opaque:
    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []


class Giver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, shared: Opaque) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        shared.values.append(y * 2)
        return y


class Taker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, shared: Opaque) -> torch.Tensor:
        result: torch.Tensor = self.block(x) + shared.values[0]
        return result


class Collecting(nn.Module):
    """Collects by hooks what its layers return, or what a part of each returns, and uses it."""

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.collected: list[torch.Tensor] = []
        for layer in self.layers:
            layer.get_submodule(part).register_forward_hook(self.collect)

    def collect(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        self.collected.append(output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A new list, which a hook of the original would not fill on a stage.
        self.collected = []
        for layer in self.layers:
            x = layer(x)
        gathered = torch.stack([(n + 1) * state for n, state in enumerate(self.collected)])
        result: torch.Tensor = self.head(x * self.collected[1]) + gathered.sum(0)
        self.collected = []
        return result


class Named(nn.Module):
    """Layers in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"first": Block(), "second": Block()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Moody(nn.Module):
    """A model that returns None in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.last(x) * (not self.training)
        return result
