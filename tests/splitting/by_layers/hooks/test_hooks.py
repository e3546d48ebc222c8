"""Forward hooks of layers are called on every stage, so that what they collect is complete."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import spectral_norm

import penstock as ps
from penstock.errors import ModelError
from penstock.splitting.by_layers.hooks.hooks import is_active, is_foreign
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.by_layers.stand_ins import StandIn
from tests.processes import Processes
from tests.splitting import small
from tests.splitting.checking import assert_same_gradients, gradients, squares
from tests.splitting.small import WIDTH, Block, Chain, numbers

X = numbers(8, WIDTH)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("part", ["", "linear"], ids=["layers", "parts of layers"])
def test_collected_outputs_are_those_of_the_whole_model(part: str, stages: int) -> None:
    # Hooks ran only where the layer was: index 1 was another layer's output on each stage, and
    # a hook that is a method of the model filled the list of the original.
    torch.manual_seed(0)
    model = small.Collecting(part)
    expected = model(X)
    pipe = split_layers(model, ["layers"], stages, (X,), {})
    assert torch.equal(pipe(X), expected)
    assert_same_gradients(model, pipe, (X,))
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("part", ["", "linear"], ids=["layers", "parts of layers"])
def test_collected_outputs_without_an_example_are_refused(part: str) -> None:
    pipe = split_layers(small.Collecting(part), ["layers"], 4)
    with pytest.raises(ModelError, match=r"which was not sent to stage 3; split with example="):
        pipe(X)


class Listed(nn.Module):
    """A model that returns everything that is in a list at the end."""

    def __init__(self, found: list[torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.found = found

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.found.clear()
        for layer in self.layers:
            x = layer(x)
        return (x, *self.found)


def after(hook: Callable[..., Any], **options: bool) -> Callable[[nn.Module], Any]:
    return lambda module: module.register_forward_hook(hook, **options)


def before(hook: Callable[..., Any], **options: bool) -> Callable[[nn.Module], Any]:
    return lambda module: module.register_forward_pre_hook(hook, **options)


def keep(found: list[torch.Tensor], _module: nn.Module, *given: Any) -> None:
    found.append(given[-1][0] if isinstance(given[-1], tuple) else given[-1])


@pytest.mark.parametrize("path", ["", "linear"], ids=["layers", "parts of layers"])
@pytest.mark.parametrize("is_late", [False, True], ids=["before the split", "after the split"])
@pytest.mark.parametrize("kind", ["after", "before", "with keywords"])
def test_hooks_that_are_registered_at_any_time_are_called_everywhere(
    kind: str, is_late: bool, path: str
) -> None:
    found: list[torch.Tensor] = []
    register = {
        "after": after(partial(keep, found)),
        "before": before(partial(keep, found)),
        "with keywords": after(
            lambda _module, _args, _kwargs, output: found.append(output), with_kwargs=True
        ),
    }[kind]
    torch.manual_seed(0)
    model = Listed(found)
    handles = [] if is_late else [register(layer.get_submodule(path)) for layer in model.layers]
    pipe = split_layers(model, ["layers"], 2)
    if is_late:
        handles = [register(layer.get_submodule(path)) for layer in model.layers]
    with pytest.raises(ModelError, match="not sent to stage 1"):
        pipe(X)
    assert len(found) == 4
    assert any(isinstance(value, StandIn) for value in found[:2])
    for handle in handles:
        handle.remove()
    assert len(pipe(X)) == 1


def test_a_hook_that_replaces_what_a_layer_returns_is_not_applied_twice() -> None:
    torch.manual_seed(0)
    model, seen = Chain(), []
    pipe = split_layers(model, ["layers"], 2)
    x = numbers(8, 3)
    pipe(x)
    # Registered after the first run, these ran after the layer's output had been recorded.
    model.layers[1].register_forward_hook(lambda _module, _args, output: output * 3)
    model.layers[1].register_forward_hook(lambda _module, _args, output: seen.append(output))
    expected = model(x)
    assert torch.equal(pipe(x), expected)
    assert [isinstance(value, StandIn) for value in seen] == [False, False, True]
    assert_same_gradients(model, pipe, (x,))


def triple(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
    output.mul_(3)


def test_a_hook_that_writes_to_what_a_layer_returns_is_not_applied_twice() -> None:
    torch.manual_seed(0)
    model = Chain()
    model.layers[1].register_forward_hook(triple)
    x = numbers(8, 3)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(split_layers(model, ["layers"], 2)(x), expected)
        assert torch.equal(split_layers(model, ["layers"], 2, (x,), {})(x), expected)


class Weighing(nn.Module):
    """A model that weighs its output by numbers that a hook has read from layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norms: list[float] = []
        for layer in self.layers:
            layer.register_forward_hook(partial(weigh, self.norms))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norms.clear()
        for layer in self.layers:
            x = layer(x)
        return x * sum(self.norms)


def weigh(norms: list[float], _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
    norms.append(output.norm().item())


@pytest.mark.parametrize("given", [(), ((X,), {})], ids=["plain", "example"])
def test_a_hook_that_needs_values_and_changes_the_model_is_refused(
    given: tuple[Any, ...],
) -> None:
    pipe = split_layers(Weighing(), ["layers"], 2, *given)
    with pytest.raises(ModelError, match=r"hook weigh of 'layers\.0' .*penstock\.here_only"):
        pipe(X)


def test_a_hook_that_only_observes_is_called_where_its_layer_is() -> None:
    norms: list[float] = []
    model = Chain()
    for layer in model.layers:
        layer.register_forward_hook(partial(weigh, norms))
    pipe = split_layers(model, ["layers"], 2)
    pipe(numbers(8, 3))
    assert len(norms) == 4


def test_a_hook_may_be_marked_as_only_observing() -> None:
    model = Weighing()
    for layer in model.layers:
        layer._forward_hooks.clear()
        layer.register_forward_hook(ps.here_only(partial(weigh, model.norms)))
    pipe = split_layers(model, ["layers"], 2)
    pipe(X)
    assert len(model.norms) == 2


def test_a_hook_of_all_modules_is_called_for_parts_of_remote_layers() -> None:
    found: list[str] = []
    model = Chain()
    pipe = split_layers(model, ["layers"], 2)
    handle = register_module_forward_hook(
        lambda module, _args, _out: found.append(module.__class__.__name__)
    )
    try:
        model(numbers(8, 3))
        whole = list(found)
        found.clear()
        pipe(numbers(8, 3))
    finally:
        handle.remove()
    # Stage 0 ends before the third layer; stage 1 runs through everything.
    start = whole.index("Block", whole.index("Block") + 1) + 1
    last = [name for name in found[start:] if not name.endswith("Stage")]
    assert last == whole


class Installing(nn.Module):
    """A model that registers hooks on its layers in its first run, and remembers that."""

    def __init__(self, *, is_forgetful: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.found: list[torch.Tensor] = []
        self.is_installed, self.is_forgetful = False, is_forgetful

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.found.clear()
        if not self.is_installed:
            self.is_installed = not self.is_forgetful
            for layer in self.layers:
                layer.get_submodule("linear").register_forward_hook(partial(keep, self.found))
        for layer in self.layers:
            x = layer(x)
        return (x, *self.found)


def test_hooks_that_the_model_registers_while_it_runs_belong_to_their_stage() -> None:
    model = Installing()
    pipe = split_layers(model, ["layers"], 2)
    for _ in range(2):
        with pytest.raises(ModelError, match="not sent to stage 1"):
            pipe(X)
        assert len(model.found) == 4


def test_hooks_that_are_registered_in_every_run_and_not_removed_are_refused() -> None:
    pipe = split_layers(Installing(is_forgetful=True), ["layers"], 2)
    with pytest.raises(ModelError, match="not sent to stage 1"):
        pipe(X)
    with pytest.raises(ModelError, match=r"registers the hook .* in every run"):
        pipe(X)


def test_hooks_of_torch_and_of_this_package_are_called_only_where_the_module_is() -> None:
    layer = spectral_norm(nn.Linear(2, 2))
    (hook,) = layer._forward_pre_hooks.values()
    assert not is_foreign(hook)
    assert not is_foreign(ps.here_only(print))
    assert is_foreign(lambda *_: None)
    assert is_active(keep)


def collect_over_ranks(rank: int, part: str) -> dict[str, torch.Tensor]:
    """Train a model that collects what its layers return, on two ranks with two stages each."""
    del rank
    torch.manual_seed(0)
    model = small.Collecting(part)
    pipe = split_layers(model, ["layers"], 4, (X,), {})
    pipeline = ps.Pipeline(
        pipe, "ZBV", microbatches=2, loss=squares, group=torch.distributed.group.WORLD
    )
    pipeline.step(X, target=torch.zeros(8))
    return {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("part", ["", "linear"], ids=["layers", "parts of layers"])
def test_collected_outputs_go_between_processes(two_processes: Processes, part: str) -> None:
    torch.manual_seed(0)
    model = small.Collecting(part)
    torch.autograd.backward(squares(model(X)))
    expected = gradients(model)
    found = {n: g for held in two_processes.run(collect_over_ranks, part) for n, g in held.items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=0, atol=1e-12), name
