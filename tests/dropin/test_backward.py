import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.dropin._backward import (
    _null_coalesce_accumulate,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

ROWS, WIDTH = 4, 6


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH).double()


class Shared(nn.Module):
    """One weight, used twice on the way from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight) @ self.weight


class Derived(nn.Module):
    """A weight that is computed once from parameters and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, 1).double())
        self.direction = nn.Parameter(torch.randn(WIDTH, WIDTH).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.scale * self.direction / self.direction.norm()
        hidden = (x @ weight).tanh()
        return torch.matmul(hidden, weight)


class Chained(nn.Module):
    """Weights that join groups which were apart: a at one place, b at another, c at both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Parameter(torch.randn(WIDTH, WIDTH).double()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = (x @ (self.a + self.c)).tanh()
        second = (first @ self.b).tanh()
        return second @ (self.b * self.c)


class Chunked(nn.Module):
    """An operation with several outputs between weights and the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.layer(x).chunk(2, dim=-1)
        return torch.mul(gate.sigmoid(), value)


class Pair(torch.autograd.Function):
    """A node with two inputs and two outputs, one of them for a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:  # noqa: ARG004  # torch's form
        return x.clone(), weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ARG004  # torch's form
        return gradients


class TwoWays(nn.Module):
    """A node whose two outputs lead to a weight and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, weight = Pair.apply(x, self.weight)  # type: ignore[no-untyped-call]  # upstream
        product: torch.Tensor = value @ weight
        return product


class Product(torch.autograd.Function):
    """Computes only what is asked for."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return (
            gradient @ b.mT if ctx.needs_input_grad[0] else None,
            a.mT @ gradient if ctx.needs_input_grad[1] else None,
        )


class Custom(nn.Module):
    """A weight inside a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]  # upstream
        return product


class Apart(nn.Module):
    """A weight that never meets the input, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.apart = nn.Parameter(torch.randn(ROWS, WIDTH).double())
        self.unused = nn.Parameter(torch.randn(3).double())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.apart.exp()


class Hooked(nn.Module):
    """A hook that changes the gradient on its way to weight and input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x)
        hidden.register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]  # upstream
        result: torch.Tensor = self.second(hidden)
        return result


class View(nn.Module):
    """An output that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.Tensor.view(self.layer(x), -1)


MODELS: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(WIDTH).double(), linear()),
    Shared,
    Derived,
    Chained,
    Chunked,
    TwoWays,
    Custom,
    Apart,
    Hooked,
    View,
]


def as_list(outputs: Any) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def reference(
    model: nn.Module, x: torch.Tensor, grads: list[torch.Tensor]
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor | None]]:
    x = x.detach().clone().requires_grad_()
    torch.autograd.backward(as_list(model(x)), grads)
    return x.grad, {name: weight.grad for name, weight in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("make", MODELS)
def test_both_halves_give_what_the_whole_gives(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(ROWS, WIDTH).double().requires_grad_()
    grads = [torch.randn_like(output) for output in as_list(model(x))]
    expected = reference(copy.deepcopy(model), x, grads)
    outputs = as_list(model(x))
    dinputs, param_groups = stage_backward_input(outputs, grads, [x], model.parameters())
    assert gradients(model) == dict.fromkeys(gradients(model))
    torch.testing.assert_close((x.grad, dinputs[0]), (expected[0], expected[0]))
    del outputs
    stage_backward_weight(model.parameters(), param_groups)
    torch.testing.assert_close(gradients(model), expected[1])


@pytest.mark.parametrize("make", MODELS)
def test_weight_gradients_need_no_input_that_asks_for_one(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = torch.randn(ROWS, WIDTH).double()
    outputs = as_list(model(x))
    grads = [torch.randn_like(output) for output in outputs]
    expected = reference(copy.deepcopy(model), x, grads)
    dinputs, param_groups = stage_backward_input(outputs, grads, [x], model.parameters())
    stage_backward_weight(model.parameters(), param_groups)
    assert dinputs == (None,)
    torch.testing.assert_close(gradients(model), expected[1])


def test_halves_add_up_over_microbatches() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    copied = copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH).double().requires_grad_()
        _, groups = stage_backward_input([model(x).sum()], None, [x], model.parameters())
        stage_backward_weight(model.parameters(), groups)
        copied(x).sum().backward()
    torch.testing.assert_close(gradients(model), gradients(copied))


def test_what_is_not_a_tensor_has_no_gradient() -> None:
    model, x = linear(), torch.randn(ROWS, WIDTH).double().requires_grad_()
    inputs = [object(), x, 3]
    dinputs, _ = stage_backward_input([model(x).sum()], None, inputs, model.parameters())
    assert [grad is None for grad in dinputs] == [True, False, True]


@pytest.mark.parametrize("given", [(0, 1), (0,), (1,)])
def test_gradients_may_be_written_by_the_caller(given: tuple[int, ...]) -> None:
    model = TwoWays()
    x = torch.randn(ROWS, WIDTH).double().requires_grad_()
    _, (group,) = stage_backward_input([model(x).sum()], None, [x], model.parameters())
    mine = torch.randn(ROWS, WIDTH).double(), torch.randn(WIDTH, WIDTH).double()
    group["grads"] = [tuple(mine[n] if n in given else None for n in range(2))]
    stage_backward_weight(model.parameters(), [group])
    expected = mine[1] if 1 in given else torch.zeros(WIDTH, WIDTH).double()
    found = model.weight.grad
    torch.testing.assert_close(torch.zeros_like(expected) if found is None else found, expected)


def test_the_graph_can_be_kept_for_a_second_time() -> None:
    model, x = linear(), torch.randn(ROWS, WIDTH).double().requires_grad_()
    _, groups = stage_backward_input([model(x).sum()], None, [x], model.parameters())
    stage_backward_weight(model.parameters(), copy.copy([dict(g) for g in groups]), True)
    stage_backward_weight(model.parameters(), groups)
    torch.testing.assert_close(model.bias.grad, torch.full((WIDTH,), 2.0 * ROWS).double())


def test_halves_leave_nothing_for_the_garbage_collector() -> None:
    model, x = Shared(), torch.randn(ROWS, WIDTH).double().requires_grad_()

    def run_halves() -> None:
        _, groups = stage_backward_input([model(x).sum()], None, [x], model.parameters())
        stage_backward_weight(model.parameters(), groups)

    # The first call of a process may import something, which leaves garbage of its own, and
    # finalizers of earlier tests may leave some for the next collection.
    run_halves()
    while gc.collect():
        pass
    gc.disable()
    try:
        run_halves()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_whole_backward_takes_any_tree_and_returns_the_gradients_of_the_inputs() -> None:
    model = nn.ModuleList([linear(), linear()])
    x = torch.randn(ROWS, WIDTH).double().requires_grad_()
    unused = torch.randn(2).requires_grad_()
    output = {"a": model[0](x), "b": (model[1](x), torch.ones(1), "text")}
    grads = {"a": torch.ones_like(output["a"]), "b": (torch.ones_like(output["a"]), None, None)}
    expected = reference_of_sum(copy.deepcopy(model), x)
    found = stage_backward(stage_output=output, output_grads=grads, input_values=(x, unused, 3))
    torch.testing.assert_close(found[0], expected[0])
    assert (found[1:], x.grad) == ((None, None), None)
    torch.testing.assert_close(gradients(model), expected[1])


def reference_of_sum(
    model: nn.ModuleList, x: torch.Tensor
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor | None]]:
    x = x.detach().requires_grad_()
    sum(layer(x) for layer in model).sum().backward()
    return x.grad, gradients(model)


def test_a_backward_may_start_from_edges_after_the_output_is_gone() -> None:
    model, x = linear(), torch.randn(ROWS, WIDTH).double().requires_grad_()
    grad = torch.randn(ROWS, WIDTH).double()
    expected = reference(copy.deepcopy(model), x, [grad])
    (found,) = stage_backward((get_gradient_edge(model(x)),), (grad,), (x,))
    torch.testing.assert_close((found, gradients(model)), expected)
    model.zero_grad()
    edge = get_gradient_edge(model(x))
    (found,), groups = stage_backward_input([edge], [grad], [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    torch.testing.assert_close((found, gradients(model)), expected)
    with pytest.raises(AssertionError, match="requires output gradients"):
        stage_backward_input([edge], None, [x], model.parameters())


def test_a_failing_backward_says_what_it_was_given() -> None:
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    with pytest.raises(RuntimeError, match=r"the backward of a stage failed .*Tensor\(torch.Size"):
        stage_backward(x * 2, torch.ones(3), (x,))
    with pytest.raises(RuntimeError, match="the backward for inputs of a stage failed"):
        stage_backward_input([x * 2], [torch.ones(3)], [x], [])


def test_deprecated_indices_pick_outputs() -> None:
    x = torch.randn(3).requires_grad_()
    outputs = [x * 2, x * 3]
    (found,) = stage_backward(outputs, [torch.ones(3), torch.ones(3)], [x], [1])
    torch.testing.assert_close(found, torch.full((3,), 3.0))


def test_gradients_add_up_where_one_may_be_missing() -> None:
    one = torch.ones(1)
    assert _null_coalesce_accumulate(None, None) is None
    assert _null_coalesce_accumulate(one, None) is one
    assert _null_coalesce_accumulate(None, one) is one
    torch.testing.assert_close(_null_coalesce_accumulate(one, one), torch.tensor([2.0]))
