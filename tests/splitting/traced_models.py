"""Models that are traced: each has something in it that a cut must not break."""

from typing import Any

import torch
from torch import nn

from penstock.splitting.marks import pipe_split

SIZE = 6


class SkipAndShared(nn.Module):
    """A parameter that two stages use, and a value that skips a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(SIZE, SIZE))
        self.second = nn.Parameter(torch.randn(SIZE, SIZE))
        self.middle = nn.Linear(SIZE, SIZE)
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.mm(x, self.first)
        skip = x
        x = torch.relu(x + y)
        pipe_split()
        x = self.middle(torch.mm(x, self.first))
        pipe_split()
        x = torch.mm(torch.relu(x) + skip, self.second)
        pipe_split()
        return torch.relu(self.last(x))


class Aliases(nn.Module):
    """One parameter and one module, each under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.two = nn.Parameter(torch.randn(SIZE, SIZE))
        self.left = self.right = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.left(torch.mm(x, self.one) + y))
        pipe_split()
        return torch.relu(self.right(torch.mm(x, self.two)))


class Block(nn.Module):
    """A block that is cut in its middle, and takes a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, kernel_size=3, padding=1)
        self.up = nn.Linear(SIZE, SIZE)
        self.down = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
        x = self.up(self.conv(x))
        pipe_split()
        x.add_(constant)
        return torch.relu(self.down(x))


class Blocks(nn.Module):
    """Nested modules, cut inside and between, with an operation in place behind a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.block0 = Block()
        self.block1 = Block()

    def forward(self, x: torch.Tensor, constant: torch.Tensor | None = None) -> torch.Tensor:
        assert constant is not None
        x = self.block0(x, constant=constant)
        pipe_split()
        result: torch.Tensor = self.block1(x, constant=constant)
        return result


class Tree(nn.Module):
    """Arguments and outputs that are nested, some of them no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(SIZE, SIZE)
        self.b = nn.Linear(SIZE, SIZE)

    def forward(
        self, batch: dict[str, Any], scale: float = 1.0, *, mask: torch.Tensor | None = None
    ) -> dict[str, Any]:
        x = self.a(batch["x"])
        pipe_split()
        y = self.b(x) * scale
        if mask is not None:
            y = y * mask
        return {"y": y, "more": (x, batch["pair"][1], None, scale), "rows": x.shape[0]}


class Counting(nn.Module):
    """Buffers that are written to, assigned, and kept by BatchNorm; in two stages."""

    seen: torch.Tensor
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.inner = nn.Module()
        self.inner.register_buffer("total", torch.zeros(SIZE))
        self.norm0 = nn.BatchNorm1d(SIZE)
        self.norm1 = nn.BatchNorm1d(SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.norm0(x)
        pipe_split()
        self.inner.total = self.inner.total * 0.5 + x.detach().mean(0)  # type: ignore[operator]  # untyped
        result: torch.Tensor = self.norm1(x) + self.inner.total
        return result


class ViewsWritten(nn.Module):
    """A view of a value is written to behind a cut, and the value read behind the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(SIZE, SIZE)
        self.b = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.a(x)
        row = whole[0]
        turned = whole.t()
        pipe_split()
        row.mul_(2)
        other = self.b(x)
        pipe_split()
        result: torch.Tensor = whole + other + turned.t() * 3 + row
        return result


class Regions(nn.Module):
    """Cuts inside `no_grad` and autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(SIZE, SIZE)
        self.b = nn.Linear(SIZE, SIZE)
        self.c = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.a(x)
            with torch.no_grad():
                frozen = torch.sin(x)
                pipe_split()
                frozen = frozen * 2
            x = self.b(x)
            pipe_split()
            x = self.c(x) + frozen
        return x.float()


class Made(nn.Module):
    """Tensors that the model makes itself, from sizes, on a device, and as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(SIZE, SIZE)
        self.b = nn.Linear(SIZE, SIZE)
        self.kept = torch.arange(SIZE, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x) + self.kept
        rows, columns = x.shape
        pipe_split()
        positions = torch.arange(rows, device=x.device).unsqueeze(1)
        weights = torch.tensor([0.5] * SIZE)
        result: torch.Tensor = self.b(x * weights + positions + torch.ones(columns)) * (rows * 2)
        return result


class Tied(nn.Module):
    """An embedding whose weight is the head's, a buffer, and a parameter that nobody uses."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, SIZE)
        self.layers = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4)))
        self.layers[2].register_parameter("spare", nn.Parameter(torch.ones(2)))
        self.head = nn.Linear(SIZE, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        logits: torch.Tensor = self.head(self.layers(x)) * self.scale
        return logits


class Dropping(nn.Module):
    """Dropout on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(SIZE, SIZE)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.a(x))
        pipe_split()
        result: torch.Tensor = self.drop(torch.sin(x))
        return result


class Layers(nn.Module):
    """A list of layers without marks."""

    def __init__(self, count: int = 8, width: int = SIZE) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
                for _ in range(count)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x
