"""The layers of torch that users put into models, each from an activation to one of its shape."""

import torch
from torch import nn

from tests.differential.case import WIDTH

__all__ = ["LAYERS"]


def _with_time(h: torch.Tensor) -> torch.Tensor:
    """The activation as [rows, time, features]; one without time gets one moment."""
    return h if h.dim() == 3 else h.unsqueeze(1)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(h)
        return made


class Feedforward(nn.Module):
    """Two linear layers with a branch between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.tanh(self.up(h)) * torch.sigmoid(self.gate(h)))
        return made


class Convolution(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.layer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(_with_time(h).transpose(1, 2))
        return made.transpose(1, 2).reshape(h.shape)


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Convolution(groups=WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(h)
        return made


class Lookup(nn.Module):
    """An embedding of numbers that are read off the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(5, WIDTH, padding_idx=2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer((h.detach().sum(-1).abs() * 3).long() % 5)
        return h * 0.5 + found


class SparseLookup(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer((h.detach().sum(-1).abs() * 3).long() % 5)
        return h * 0.5 + found


class Bag(nn.Module):
    """A bag of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.EmbeddingBag(5, WIDTH, mode="sum")

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        numbers = (h.detach().flatten(0, -2).abs() * 3).long() % 5
        found: torch.Tensor = self.layer(numbers)
        return h * 0.5 + found.view_as(h)


class LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(h)
        return made


class RootNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RMSNorm(WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(h)
        return made


class BatchNorm(nn.Module):
    """Its running statistics are means over all microbatches, whatever their order."""

    def __init__(self, momentum: float | None = None) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(_with_time(h).transpose(1, 2))
        return made.transpose(1, 2).reshape(h.shape)


class MovingBatchNorm(nn.Module):
    """Its running statistics depend on the order of microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BatchNorm(momentum=0.3)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(h)
        return made


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(_with_time(h))[0]
        return made.view_as(h)


class RecurrentCell(nn.Module):
    """A cell whose weights are used once per moment."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        sequence = _with_time(h)
        state = torch.zeros_like(sequence[:, 0])
        states = []
        for moment in range(sequence.shape[1]):
            state = self.layer(sequence[:, moment], state)
            states.append(state)
        return torch.stack(states, 1).view_as(h)


class Attention(nn.Module):
    """Attention over time with one weight for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inputs(_with_time(h)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        made: torch.Tensor = self.output(mixed)
        return made.view_as(h)


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        sequence = _with_time(h)
        made: torch.Tensor = self.layer(sequence, sequence, sequence, need_weights=False)[0]
        return made.reshape(h.shape)


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(h, torch.tanh(h))
        return made


class Repeated(nn.Module):
    """One layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            h = torch.tanh(self.layer(h)) + 0.5 * h
        return h


class SharedWeight(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.tanh(self.first(h)))
        return made


class Dropped(nn.Module):
    """Random numbers in a stage: the pipeline has a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = nn.functional.dropout(self.layer(h), 0.4, self.training)
        return made


LAYERS: dict[str, type[nn.Module]] = {
    "linear": Linear,
    "feedforward": Feedforward,
    "convolution": Convolution,
    "depthwise": Depthwise,
    "lookup": Lookup,
    "sparse_lookup": SparseLookup,
    "bag": Bag,
    "layer_norm": LayerNorm,
    "root_norm": RootNorm,
    "batch_norm": BatchNorm,
    "moving_batch_norm": MovingBatchNorm,
    "recurrent": Recurrent,
    "recurrent_cell": RecurrentCell,
    "attention": Attention,
    "multi_head": MultiHead,
    "bilinear": Bilinear,
    "repeated": Repeated,
    "shared_weight": SharedWeight,
    "dropout": Dropped,
}
