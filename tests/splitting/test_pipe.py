"""A pipe runs like the model, and a rank needs memory only for its own stages."""

from functools import partial

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ModelError
from penstock.ir.dataflow import Dataflow
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.pipe import Pipe, check_complete
from tests.splitting import small
from tests.splitting.checking import squares
from tests.splitting.small import WIDTH, Block, Chain, numbers

X = numbers(4, WIDTH)


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | Tied):
        module.reset_parameters()


class Tied(nn.Module):
    """A model with a tied head, and a parameter outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x) * self.scale
        return result


def test_parameters_and_state_are_the_model_s() -> None:
    model = Tied()
    pipe = split_layers(model, ["layers"], 2, (X,), {})
    assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert set(pipe.parameters()) == set(model.parameters())
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert [tie.places for tie in pipe.ties] == [((0, "embed.weight"), (1, "head.weight"))]
    assert [tie.stages for tie in pipe.ties] == [(0, 1)]


def test_run_detached_cuts_gradients_between_stages() -> None:
    model = small.Skips()
    pipe = split_layers(model, ["layers"], 2, (X,), {})
    assert torch.equal(pipe.run_detached(X), model(X))
    torch.autograd.backward(squares(pipe.run_detached(X)))
    has_gradient = [p.grad is not None for p in model.parameters()]
    assert has_gradient == [False] * 4 + [True] * 4
    model.zero_grad()
    torch.autograd.backward(squares(pipe(X)))
    assert all(p.grad is not None for p in model.parameters())


def test_print_gives_a_line_per_stage() -> None:
    pipe = split_layers(small.Skips(), ["layers"], 4, (X,), {})
    assert str(pipe).splitlines() == [
        "4 stages of the layers in layers",
        "  0              42 parameters         0.0 MiB  feeds 1",
        "  1              42 parameters         0.0 MiB  feeds 2, 3",
        "  2              42 parameters         0.0 MiB  feeds 3",
        "  3              42 parameters         0.0 MiB  feeds nothing",
    ]


def test_a_pipe_is_moved_as_a_whole() -> None:
    pipe = split_layers(Chain(), ["layers"], 2)
    assert pipe.to("meta") is pipe
    assert all(parameter.is_meta for parameter in pipe.parameters())


@pytest.mark.parametrize("own", [[0], [1], [0, 1]])
@pytest.mark.parametrize("has_example", [True, False])
def test_only_own_stages_of_a_model_on_the_meta_device_get_memory(
    own: list[int], has_example: bool
) -> None:
    with torch.device("meta"):
        model = Tied()
    args = (X,) if has_example else None
    pipe = split_layers(model, ["layers"], 2, args)
    assert [tie.stages for tie in pipe.ties] == [(0, 1)]
    pipe.materialize(own, "cpu", reset)
    for index, stage in enumerate(pipe.stages):
        assert {p.is_meta for p in stage.parameters()} == {index not in own}
        assert all(p.isfinite().all() for p in stage.parameters() if not p.is_meta)
    holder = pipe.stages[1 if has_example else 0]
    if not holder.get_parameter("scale").is_meta:
        assert holder.get_parameter("scale") == 2
    if own == [0, 1]:
        first, last = pipe.stages
        assert first.get_parameter("embed.weight") is last.get_parameter("head.weight")


def test_materialized_stages_train_like_a_model_with_the_same_weights() -> None:
    torch.manual_seed(0)
    reference = Tied()
    with torch.device("meta"):
        model = Tied()
    pipe = split_layers(model, ["layers"], 4, (X,), {})
    pipe.materialize(range(4), "cpu", reset)
    state = reference.state_dict()
    for stage in pipe.stages:
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    assert torch.equal(pipe(X), reference(X))
    ps.Pipeline(pipe, "ZBV", microbatches=2, loss=squares).step(X, target=torch.zeros(4))
    torch.autograd.backward(squares(reference(X)))
    expected = dict(reference.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-12)


def test_weights_may_be_assigned_without_materializing() -> None:
    torch.manual_seed(0)
    reference = Tied()
    with torch.device("meta"):
        model = Tied()
    pipe = split_layers(model, ["layers"], 4, (X,), {})
    state = reference.state_dict()
    for stage in pipe.stages:
        held = {name: state[name] for name in stage.state_dict()}
        stage.load_state_dict(held, assign=True)
    assert torch.equal(pipe(X), reference(X))


def test_lost_and_added_state_is_refused() -> None:
    model = Chain(2)
    with pytest.raises(ModelError) as caught:
        check_complete(model, [model.embed, nn.ModuleDict({"layers": model.layers})])
    assert "no stage holds embed.bias, embed.weight, head.bias, head.weight" in str(caught.value)
    whole = nn.ModuleDict(dict(model.named_children()))
    check_complete(model, [whole])
    whole["more"] = nn.Linear(1, 1, bias=False)
    with pytest.raises(ModelError) as caught:
        check_complete(model, [whole])
    assert str(caught.value) == "stages hold more.weight, which the model does not have"


def test_any_modules_make_a_pipe() -> None:
    stages = (nn.Linear(2, 2), nn.Linear(2, 2), nn.Bilinear(2, 2, 1))
    pipe = Pipe(stages, Dataflow(3, [(0, 1), (1, 2), (0, 2)]))
    value = torch.ones(3, 2)
    first = stages[0](value)
    assert torch.equal(pipe(value), stages[2](first, stages[1](first)))
    assert pipe.num_stages == 3
    assert pipe.ties == ()


def test_initialization_sees_no_gradients() -> None:
    with torch.device("meta"):
        model = Chain(2)
    pipe = split_layers(model, ["layers"], 2)
    pipe.materialize([0], "cpu", partial(_fill, 1.0))
    assert all((p == 1).all() for p in pipe.stages[0].parameters())


def _fill(value: float, module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.fill_(value)
