"""Helpers of the tests of the split backward: run both halves, and plain autograd to compare."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.deferred.work import DeferredWork, add_weight_gradients
from penstock.step.backward import LayerRecorder, Root

__all__ = [
    "MICROBATCHES",
    "Apply",
    "Gradients",
    "Split",
    "assert_same",
    "check",
    "prepared",
    "random_values",
    "run_plain",
    "run_split",
    "waiting_weights",
]

MICROBATCHES = 4


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]


def _roots(output: Any, seed: int) -> list[Root]:
    """Pair each output that requires a gradient with a random one, the same in all dtypes."""
    generator = torch.Generator().manual_seed(seed)
    outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    values = [torch.randn(o.shape, generator=generator).bfloat16() for o in outputs]
    return [
        (get_gradient_edge(output), value.to(output))
        for output, value in zip(outputs, values, strict=True)
    ]


class Gradients(NamedTuple):
    inputs: list[torch.Tensor]
    parameters: dict[str, torch.Tensor | None]


def _gradients(module: nn.Module, inputs: list[torch.Tensor]) -> Gradients:
    return Gradients(inputs, {name: p.grad for name, p in module.named_parameters()})


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.is_floating_point())


def run_plain(module: nn.Module, values: Sequence[torch.Tensor]) -> Gradients:
    """Return the gradients of plain autograd, one microbatch after the other."""
    found = []
    for number, value in enumerate(values):
        leaf = _leaf(value)
        torch.manual_seed(number)
        edges, gradients = zip(*_roots(module(leaf.clone()), number), strict=True)
        torch.autograd.backward(edges, gradients)
        found.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    return _gradients(module, found)


class Split:
    """A module that runs like a stage: forwards, then both halves of its backwards."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.recorder = LayerRecorder()
        self.is_splittable = self.recorder.observe(module)
        self.inputs: dict[int, torch.Tensor] = {}
        self.flights: dict[int, tuple[list[Root], torch.Tensor]] = {}
        self.waiting: dict[int, list[DeferredWork]] = {}

    def forward(self, number: int, value: torch.Tensor) -> None:
        leaf = _leaf(value)
        torch.manual_seed(number)
        with self.recorder.record():
            # Like a stage, pass a copy that the module may write to.
            output = self.module(leaf.clone())
        self.flights[number] = _roots(output, number), leaf

    def backward_input(self, number: int) -> None:
        roots, leaf = self.flights.pop(number)
        leaves = [leaf] if leaf.requires_grad else []
        found, self.waiting[number] = self.recorder.run_backward(roots, leaves)
        self.inputs[number] = next(iter(found), torch.zeros_like(leaf))

    def backward_weight(self, number: int) -> None:
        add_weight_gradients(self.waiting.pop(number))

    def gradients(self) -> Gradients:
        return _gradients(self.module, [self.inputs[number] for number in sorted(self.inputs)])


def run_split(module: nn.Module, values: Sequence[torch.Tensor]) -> Gradients:
    """Run F0 I0 W0 first, then all forwards, all I in order, all W in reverse."""
    split = Split(module)
    split.forward(0, values[0])
    split.backward_input(0)
    split.backward_weight(0)
    rest = range(1, len(values))
    for number in rest:
        split.forward(number, values[number])
    for number in rest:
        split.backward_input(number)
    for number in reversed(rest):
        split.backward_weight(number)
    return split.gradients()


def assert_same(
    found: Gradients, expected: Gradients, *, rtol: float = 1e-12, atol: float = 1e-12
) -> None:
    torch.testing.assert_close(found.inputs, expected.inputs, rtol=rtol, atol=atol)
    given = {name for name, gradient in expected.parameters.items() if gradient is not None}
    assert {name for name, gradient in found.parameters.items() if gradient is not None} == given
    for name in given:
        torch.testing.assert_close(
            found.parameters[name], expected.parameters[name], rtol=rtol, atol=atol
        )


class Apply(nn.Module):
    """Modules by name, and a function of them and the input."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def random_values(*shape: int) -> list[torch.Tensor]:
    """Return a random input for each microbatch."""
    return [torch.randn(*shape, dtype=torch.float64) for _ in range(MICROBATCHES)]


def check(build: Callable[[], nn.Module], values: Sequence[torch.Tensor]) -> None:
    """Build a module twice, and compare both halves with plain autograd."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(build().double())
    expected = run_plain(modules[0], values)
    assert_same(run_split(modules[1], values), expected)


def prepared(module: nn.Module, *shape: int) -> Split:
    """Return a split that has run one microbatch, with no gradients left."""
    split = Split(module.double())
    split.forward(-1, torch.randn(*shape, dtype=torch.float64))
    split.backward_input(-1)
    split.backward_weight(-1)
    module.zero_grad()
    return split


def waiting_weights(module: nn.Module, value: torch.Tensor) -> set[str]:
    """Return the names of the parameters whose gradients I defers in a first microbatch."""
    split = Split(module)
    split.forward(0, value)
    split.backward_input(0)
    waiting = {call.weight for call in split.waiting[0] if hasattr(call, "weight")}
    return {name for name, p in module.named_parameters() if p in waiting}
