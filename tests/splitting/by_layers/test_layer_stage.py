"""A stage is a module like any other: copied, pickled, printed, moved, put in other modes."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from penstock.ir.dataflow import Routed
from penstock.splitting.by_layers.hooks.hooks import here_only
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.by_layers.remote_modules import PartlyRemoteModule, RemoteModule
from penstock.splitting.by_layers.stand_ins import StandIn
from penstock.splitting.pipe import Pipe
from tests.splitting import small
from tests.splitting.small import WIDTH, Chain, numbers

X = numbers(4, WIDTH)
MODELS = [small.Skips, small.Token, small.Repeated, small.TiedByHand, small.Norms, small.Parts]


def example_for(make: Callable[[], nn.Module]) -> torch.Tensor:
    return torch.arange(4) if make is small.TiedByHand else X


def through_pickle(stage: nn.Module) -> nn.Module:
    copy: nn.Module = pickle.loads(pickle.dumps(stage))
    return copy


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("copy", [deepcopy, through_pickle])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_copy_of_a_stage_works_before_and_after_use(
    make: Callable[[], nn.Module], copy: Callable[[nn.Module], nn.Module], is_used: bool
) -> None:
    torch.manual_seed(0)
    model, value = make(), example_for(make)
    pipe = split_layers(model, ["layers"], 4, (value,), {})
    expected = model(value)
    if is_used:
        pipe(value)
    copies = Pipe(tuple(copy(stage) for stage in pipe.stages), pipe.dataflow)
    assert torch.equal(copies(value), expected)
    assert torch.equal(copies(value), expected)
    assert torch.equal(pipe(value), expected)
    assert copies.state_dict().keys() == model.state_dict().keys()
    held = {parameter for stage in copies.stages for parameter in stage.parameters()}
    assert not held.intersection(model.parameters())


def test_print_shows_own_and_remote_modules() -> None:
    pipe = split_layers(Chain(2), ["layers"], 2)
    block = "Block(\n      (linear): Linear(in_features=6, out_features=6, bias=True)\n    )"
    assert str(pipe.stages[1]) == (
        "LayerStage(\n"
        "  (embed): RemoteModule(Linear of another stage)\n"
        "  (layers): ModuleList(\n"
        "    (0): RemoteModule(Block of another stage)\n"
        f"    (1): {block}\n"
        "  )\n"
        "  (head): Linear(in_features=6, out_features=2, bias=True)\n"
        ")"
    )


def test_modes_reach_every_module_and_the_model_s_own_code() -> None:
    model = small.Moody().eval()
    pipe = split_layers(model, ["layers"], 2, (X,), {})
    assert not any(m.training for stage in pipe.stages for m in stage.modules())
    assert pipe(X).count_nonzero() == X.numel()
    for stage in pipe.stages:
        stage.train()
    assert all(m.training for stage in pipe.stages for m in stage.modules())
    assert pipe(X).count_nonzero() == 0
    for stage in pipe.stages:
        stage.eval()
    assert pipe(X).count_nonzero() == X.numel()


@pytest.mark.parametrize("make", MODELS)
def test_a_stage_can_be_cast(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, value = make(), example_for(make)
    pipe = split_layers(model, ["layers"], 4, (value,), {})
    pipe(value)
    for stage in pipe.stages:
        stage.float()
    value = value if not value.is_floating_point() else value.float()
    assert pipe(value).dtype == torch.float32
    for stage in pipe.stages:
        for module in stage.modules():
            stand_ins = [v for v in vars(module).values() if isinstance(v, StandIn)]
            assert all(v.dtype == torch.float32 for v in stand_ins)


def test_state_is_that_of_the_model_and_goes_both_ways() -> None:
    model = Chain()
    pipe = split_layers(model, ["layers"], 2)
    assert list(pipe.stages[1].state_dict()) == [
        "layers.2.linear.weight",
        "layers.2.linear.bias",
        "layers.3.linear.weight",
        "layers.3.linear.bias",
        "head.weight",
        "head.bias",
    ]
    other = Chain()
    for stage in pipe.stages:
        held = {
            name: value for name, value in other.state_dict().items() if name in stage.state_dict()
        }
        stage.load_state_dict(held, strict=True)
    assert torch.equal(pipe(numbers(2, 3)), other(numbers(2, 3)))
    assert torch.equal(model(numbers(2, 3)), other(numbers(2, 3)))


def test_parts_of_the_model_are_found_by_their_paths() -> None:
    model = Chain()
    pipe = split_layers(model, ["layers"], 2)
    assert pipe.stages[1].get_submodule("layers.3") is model.layers[3]
    assert isinstance(pipe.stages[1].get_submodule("layers.0"), RemoteModule)


def test_only_its_own_modules_are_given_to_apply() -> None:
    pipe = split_layers(Chain(2), ["layers"], 2)
    seen: list[str] = []
    pipe.stages[1].apply(lambda module: seen.append(type(module).__name__))
    assert seen == ["Linear", "Block", "ModuleList", "Linear", "Chain"]


def test_a_stage_returns_a_message_for_each_stage_that_it_feeds() -> None:
    pipe = split_layers(small.Skips(), ["layers"], 4, (X,), {})
    assert pipe.dataflow.consumers(1) == (2, 3)
    between = pipe.stages[0](X).values[1]
    made = pipe.stages[1](between)
    assert isinstance(made, Routed)
    assert {stage: len(message["values"]) for stage, message in made.values.items()} == {
        2: 1,
        3: 1,
    }


# ---- placeholders for the modules of other stages


class Kinds(nn.Module):
    """Looks at its layers before it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([small.Tail(), small.Block(), small.Tail(), small.Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if isinstance(layer, small.Tail):
                x = layer(x) * layer.gain * layer.doubled(1) * (len(layer.extra_state) + 1)
            else:
                assert isinstance(layer, small.Block)
                assert layer.linear.weight.dtype == torch.float64
                x = layer(x)
        return x


def test_the_model_s_code_may_read_remote_modules() -> None:
    torch.manual_seed(0)
    model = Kinds()
    examples: list[tuple[Any, ...]] = [(), ((X,), {})]
    for given in examples:
        pipe = split_layers(model, ["layers"], 4, *given)
        assert torch.equal(pipe(X), model(X))
        stage = pipe.stages[3].get_submodule("layers.0")
        assert (isinstance(stage, RemoteModule), isinstance(stage, small.Tail)) == (True, False)
        with pytest.raises(AttributeError, match="'Tail' has no attribute 'unknown'"):
            _ = stage.unknown


def test_a_module_that_several_stages_call_is_run_only_for_own_calls() -> None:
    model = small.Repeated()
    calls: list[torch.Tensor] = []
    model.layers[0].register_forward_hook(here_only(lambda _m, args, _out: calls.append(args[0])))
    pipe = split_layers(model, ["layers"], 4)
    assert isinstance(pipe.stages[3].get_submodule("layers.0"), PartlyRemoteModule)
    pipe(X)
    assert len(calls) == 3
    assert not any(isinstance(value, StandIn) for value in calls)


def test_a_forward_that_was_put_on_a_module_runs_on_its_copy() -> None:
    # Wrappers replace the forward of an object; a copy kept the one that runs the original.
    model = small.Skips()
    plain = type(model).forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) * 2

    model.forward = forward.__get__(model)  # type: ignore[method-assign]  # as wrappers do
    expected = model(X)
    pipe = split_layers(model, ["layers"], 4, (X,), {})
    assert torch.equal(pipe(X), expected)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"linear": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = self.parts["linear"](x)
        return done


class Asking(nn.Module):
    """A model that asks a part of it for the type of its parameters, and a layer for its names."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({"layers": nn.ModuleList(Named() for _ in range(2))})
        self.layers = nn.ModuleList(small.Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(next(self.tower.parameters()).dtype)
        layers: Any = self.tower["layers"]
        assert list(layers[0].parts.keys()) == ["linear"]
        for layer in (*layers, *self.layers):
            x = layer(x)
        return x


def test_a_part_of_the_model_has_its_parameters_on_every_stage() -> None:
    # Where no stage's own layers are in a part, `next(part.parameters())` was a StopIteration, and
    # a dict of modules had no keys.
    torch.manual_seed(0)
    model = Asking().double()
    pipe = split_layers(model, ["tower.layers", "layers"], 4, (X,), {})
    expected = model(X)
    assert torch.equal(pipe(X), expected)
    held = [parameter for stage in pipe.stages for parameter in stage.parameters()]
    assert not any(isinstance(parameter, StandIn) for parameter in held)
