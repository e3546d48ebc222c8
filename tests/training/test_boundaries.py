"""What may cross from stage to stage, in one process and between processes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from tests.covering import all_but_slow
from tests.models import differences, gradients_of, mean_loss
from tests.processes import Processes

Tree = dict[str, Any]
Tensors = tuple[torch.Tensor, ...]
NUM_STAGES = 4
FAMILIES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBV"]


class Layer(nn.Module):
    """A linear layer whose numbers are the same every time."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.linear.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def run(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(value))


class MakeTree(Layer):
    """Gives every kind of value that a boundary knows."""

    def forward(self, value: torch.Tensor) -> Tree:
        hidden = self.run(value)
        return {
            "h": hidden,
            "mask": value > 0,
            "pos": torch.arange(8).expand(len(value), 8),
            "rope": torch.polar(torch.ones(8), torch.arange(8.0)),
            "cache": None,
            "n": 3,
            "nested": [("text", 1.5, True), {0: hidden.mean(), 1: torch.empty(0, 8)}],
        }


class UseTree(Layer):
    """Uses all of it, and passes it on."""

    def forward(self, tree: Tree) -> Tree:
        assert (tree["cache"], tree["n"]) == (None, 3)
        assert tree["nested"][0] == ("text", 1.5, True)
        assert tree["nested"][1][1].shape == (0, 8)
        types = [tree[name].dtype for name in ("h", "mask", "pos", "rope")]
        assert types == [torch.float64, torch.bool, torch.int64, torch.complex64]
        turned = torch.view_as_real(tree["h"].to(torch.complex128) * tree["rope"]).sum(-1)
        hidden = torch.where(tree["mask"], turned, tree["h"]) + tree["pos"] / tree["n"]
        return {**tree, "h": self.run(hidden)}


class EndTree(Layer):
    """Leaves only the hidden values."""

    def forward(self, tree: Tree) -> torch.Tensor:
        return self.run(tree["h"])


class GiveExtra(Layer):
    """Gives a second value beside the hidden ones."""

    def forward(self, value: torch.Tensor) -> Tensors:
        return self.run(value), value * self.linear.bias


class IgnoreExtra(Layer):
    """Passes the second value on without a look at it."""

    def forward(self, value: torch.Tensor, extra: torch.Tensor) -> Tensors:
        return self.run(value), extra


class UseExtra(Layer):
    """Uses both values."""

    def forward(self, value: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        return self.run(value + extra)


class DropExtra(Layer):
    """Takes the second value and never uses it."""

    def forward(self, value: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  # the point
        return self.run(value)


class Plain(Layer):
    """One value in, one value out."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.run(value)


class GiveViews(Layer):
    """Gives views: a slice, a transposed one, an expanded one, and one value twice."""

    def forward(self, value: torch.Tensor) -> Tensors:
        hidden = self.run(value)
        row = hidden.mean(1, keepdim=True)
        return hidden[:, :4], hidden[:, 4:].T, row.expand(-1, 8), row, row


class UseViews(Layer):
    """Puts the views together."""

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        left, right, wide, row, again = values
        return self.run(torch.cat([left, right.T], dim=1) * wide + row * again)


class WriteInPlace(Layer):
    """Writes to what it has received, and to what it has made."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if value.grad_fn is None:
            value = value.clone()
        value.mul_(self.linear.bias).add_(1)
        hidden: torch.Tensor = self.linear(value).relu_()
        return hidden * 2


class Narrow(Layer):
    """Single precision inside, half of it outside."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, torch.float32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.run(value.float()).bfloat16()


class Widen(Layer):
    """Single precision to the end."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, torch.float32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.run(value.float())


class GiveComplex(Layer):
    """A complex value that needs a gradient."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.complex(self.run(value), value)


class UseComplex(Layer):
    """Back to real numbers."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.run(value.real * value.imag)


class PassOn(nn.Module):
    """No parameters: what it gives needs no gradient."""

    def forward(self, value: torch.Tensor) -> Tensors:
        return value, (value > 0).long()


class Look(Layer):
    """Looks numbers up by those that came in."""

    def forward(self, value: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.run(value) + self.linear.weight[index].mean(1)


CASES: dict[str, Callable[[], list[nn.Module]]] = {
    "a tree of everything": lambda: [MakeTree(0), UseTree(1), UseTree(2), EndTree(3)],
    "a value that a stage ignores and the next one uses": lambda: [
        GiveExtra(0),
        IgnoreExtra(1),
        UseExtra(2),
        Plain(3),
    ],
    "a value that nobody uses": lambda: [GiveExtra(0), IgnoreExtra(1), DropExtra(2), Plain(3)],
    "views": lambda: [Plain(0), GiveViews(1), UseViews(2), Plain(3)],
    "writing in place": lambda: [WriteInPlace(seed) for seed in range(4)],
    "half precision outside": lambda: [Narrow(0), Narrow(1), Narrow(2), Widen(3)],
    "complex values": lambda: [GiveComplex(0), UseComplex(1), GiveComplex(2), UseComplex(3)],
    "values without a gradient": lambda: [PassOn(), Look(1), PassOn(), Look(3)],
}


def make_data(name: str) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    dtype = torch.float32 if name.startswith("half") else torch.float64
    data = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return data[0], data[1]


def run_unsplit(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the stages one after the other, on the whole batch."""
    stages = CASES[name]()
    value: Any
    value, target = make_data(name)
    for stage in stages:
        value = stage(*value) if isinstance(value, tuple) else stage(value)
    loss = mean_loss(value, target)
    torch.autograd.backward(loss)
    return loss.item(), gradients_of(nn.ModuleList(stages).named_parameters())


def run_split(
    name: str, family: str, group: dist.ProcessGroup | None = None
) -> tuple[float | None, dict[str, torch.Tensor]]:
    """Two steps, of which the second counts: then all formats are known."""
    stages = CASES[name]()
    pipeline = ps.Pipeline(stages, family, microbatches=4, loss=mean_loss, group=group)
    value, target = make_data(name)
    pipeline.step(value, target=target)
    for parameter in pipeline.parameters():
        parameter.grad = None
    result = pipeline.step(value, target=target)
    return result.loss, gradients_of(pipeline.named_parameters())


def assert_same(
    name: str,
    found: tuple[float | None, dict[str, torch.Tensor]],
    expected: tuple[float, dict[str, torch.Tensor]],
) -> None:
    limit = 1e-6 if name.startswith("half") else 1e-12
    assert differences(found[1], expected[1], limit) == {}
    assert found[0] == pytest.approx(expected[0], abs=limit)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_crosses_in_one_process(name: str, family: str) -> None:
    assert_same(name, run_split(name, family), run_unsplit(name))


def cross_everything(
    rank: int, family: str
) -> dict[str, tuple[float | None, dict[str, torch.Tensor]]]:
    del rank
    return {name: run_split(name, family, dist.group.WORLD) for name in CASES}


@pytest.mark.parametrize("family", all_but_slow(["Interleaved1F1B", "ZBV"], ["ZBV"]))
def test_everything_crosses_between_two_processes(family: str, two_processes: Processes) -> None:
    everyone = two_processes.run(cross_everything, family)
    for name in CASES:
        gradients = {key: value for rank in everyone for key, value in rank[name][1].items()}
        assert_same(name, (everyone[0][name][0], gradients), run_unsplit(name))


@pytest.mark.parametrize("value", [object(), {1.5: torch.ones(2)}, {"a": {1, 2}}])
def test_value_that_cannot_cross_is_refused_with_the_place(value: object) -> None:
    class Odd(nn.Module):
        def forward(self, tensor: torch.Tensor) -> object:
            del tensor
            return value

    pipeline = ps.Pipeline([Odd(), nn.Identity()], "1F1B", microbatches=1, loss=mean_loss)
    with pytest.raises(ps.errors.PipelineError) as caught:
        pipeline.step(torch.ones(2, 2), target=torch.ones(2, 2))
    place, cause, _ = str(caught.value).split(": ", 2)
    assert (place, cause) == ("rank 0, stage 0, microbatch 0, 0F0", "BoundaryError")
