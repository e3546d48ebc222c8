"""Models that are traced and cut: same outputs, same gradients, same names."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.pipelining import pipe_split as torch_pipe_split
from torch.distributed.pipelining import pipeline
from torch.utils import _pytree as pytree

from penstock.errors import ArgumentError, BatchError, ModelError, SizeError
from penstock.splitting.by_tracing.traced import split_traced
from penstock.splitting.marks import SplitPoint, is_mark, pipe_split
from penstock.splitting.pipe import Pipe
from penstock.training.pipeline import Pipeline
from tests.splitting.traced_models import (
    SIZE,
    Aliases,
    Blocks,
    Counting,
    Dropping,
    Layers,
    Made,
    Regions,
    SkipAndShared,
    Tied,
    Tree,
    ViewsWritten,
)


def rows(count: int = 4, *more: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, *(more or (SIZE,)), generator=torch.Generator().manual_seed(seed))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "skip and shared": (SkipAndShared, (rows(), rows(seed=1)), {}),
    "aliases": (Aliases, (rows(), rows(seed=1)), {}),
    "blocks": (Blocks, (rows(3, 2, SIZE),), {"constant": rows(3, 2, SIZE)}),
    "tree": (
        Tree,
        ({"x": rows(), "pair": [rows(seed=1), rows(seed=2)]},),
        {"scale": 2.0, "mask": rows(seed=3)},
    ),
    "counting": (Counting, (rows(),), {}),
    "views written": (ViewsWritten, (rows(),), {}),
    "regions": (Regions, (rows(),), {}),
    "made": (Made, (rows(),), {}),
    "dropping": (Dropping, (rows(),), {}),
}


def make(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    factory, args, kwargs = CASES[name]
    torch.manual_seed(7)
    return factory(), args, kwargs


def run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the leaves of an output and its structure; gradients stay in the parameters."""
    torch.manual_seed(11)
    leaves, spec = pytree.tree_flatten(model(*args, **kwargs))
    losses = [x.float().square().sum() for x in leaves if is_differentiable(x)]
    torch.autograd.backward(losses)
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves], spec


def is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(given: Any, expected: Any) -> None:
    torch.testing.assert_close(given, expected, rtol=0, atol=0)


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Compare two tensors that may differ in the order of summation."""
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-5, atol=1e-6)


def clone_arguments(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)


@pytest.mark.parametrize("shared", ["replicate", "transmit"])
@pytest.mark.parametrize("name", CASES)
def test_stages_together_are_the_model(name: str, shared: Any) -> None:
    model, args, kwargs = make(name)
    plain = copy.deepcopy(model)
    pipe = split_traced(model, *clone_arguments((args, kwargs)), shared=shared)
    for _ in range(2):
        output, spec = run(pipe, *clone_arguments((args, kwargs)))
        expected, expected_spec = run(plain, *clone_arguments((args, kwargs)))
        assert_same(output, expected)
        assert spec == expected_spec
    assert_same_gradients(model, plain)
    assert_same(pipe.state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("name", CASES)
def test_every_name_and_every_tensor_is_the_models_own(name: str) -> None:
    model, args, kwargs = make(name)
    pipe = split_traced(model, args, kwargs)
    assert set(pipe.state_dict()) == set(model.state_dict())
    assert {id(p) for p in pipe.parameters()} == {id(p) for p in model.parameters()}
    own = {id(buffer) for buffer in model.buffers()}
    assert {id(b) for stage in pipe.stages for b in stage.buffers()} == own


@pytest.mark.parametrize("name", CASES)
def test_tracing_changes_nothing(name: str) -> None:
    model, args, kwargs = make(name)
    before = copy.deepcopy(model.state_dict())
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    states = torch.get_rng_state(), random.getstate()
    given = clone_arguments((args, kwargs))
    split_traced(model, *given)
    assert_same(given, (args, kwargs))
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )
    assert all(parameter.grad is None for parameter in model.parameters())


def use_marks_of_torch(module: fx.GraphModule) -> fx.GraphModule:
    for node in module.graph.nodes:
        if is_mark(node):
            node.target = torch.ops.pippy._pipe_split.default
    return module


def names_by_stage(stages: Any) -> list[set[str]]:
    return [set(stage.state_dict()) for stage in stages]


# Torch cuts no regions, keeps one of two names, puts a buffer that is written to into the last
# stage too, and counts constants as buffers.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"regions", "aliases", "counting", "made"}))
def test_stages_hold_the_same_state_as_those_of_torch(name: str) -> None:
    model, args, kwargs = make(name)
    theirs = pipeline(copy.deepcopy(model), args, kwargs, split_policy=use_marks_of_torch)
    ours = split_traced(model, args, kwargs)
    assert names_by_stage(ours.stages) == names_by_stage(
        theirs.get_stage_module(stage) for stage in range(theirs.num_stages)
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["skip and shared", "made", "counting"])
def test_outputs_are_those_of_torch(name: str) -> None:
    model, args, kwargs = make(name)
    theirs = pipeline(copy.deepcopy(model), args, kwargs, split_policy=use_marks_of_torch)
    ours = split_traced(model, args, kwargs)
    given, again = clone_arguments((args, kwargs)), clone_arguments((args, kwargs))
    flat = [*again[0], *again[1].values()]
    assert_same(ours(*given[0], **given[1]), theirs(*flat)[0])


def test_marks_of_torch_are_understood() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(SIZE, SIZE)
            self.b = nn.Linear(SIZE, SIZE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            torch_pipe_split()  # type: ignore[no-untyped-call]  # untyped upstream
            result: torch.Tensor = self.b(x)
            return result

    pipe = split_traced(Marked(), (rows(),))
    assert names_by_stage(pipe.stages) == [{"a.weight", "a.bias"}, {"b.weight", "b.bias"}]


def test_a_model_is_cut_at_paths_of_modules() -> None:
    model = Layers(6)
    at = {"layers.2": SplitPoint.BEGINNING, "layers.3": SplitPoint.END}
    pipe = split_traced(model, (rows(),), at=at)
    held = [
        sorted({name.split(".")[1] for name in names}) for names in names_by_stage(pipe.stages)
    ]
    assert held == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert_same(pipe(rows(5)), model(rows(5)))


def test_a_policy_puts_marks_into_the_graph() -> None:
    def before_each_tanh(module: fx.GraphModule) -> fx.GraphModule:
        for node in list(module.graph.nodes):
            if node.target is torch.ops.aten.tanh.default:
                with module.graph.inserting_before(node):
                    module.graph.call_function(pipe_split)
        return module

    model = Layers(3)
    pipe = split_traced(model, (rows(),), at=before_each_tanh)
    assert pipe.num_stages == 4
    assert_same(pipe(rows()), model(rows()))


@pytest.mark.parametrize("stages", range(1, 9))
def test_equal_layers_are_distributed_as_evenly_as_possible(stages: int) -> None:
    pipe = split_traced(Layers(8, width=64), (rows(4, 64),), stages=stages)
    whole = sum(parameter.numel() for parameter in pipe.parameters())
    largest = max(sum(p.numel() for p in stage.parameters()) for stage in pipe.stages)
    assert pipe.num_stages == stages
    assert pipe.dataflow.is_chain
    assert largest <= whole * (-(-16 // stages)) / 16 * 1.02


def test_weights_may_be_given() -> None:
    model = Layers(8, width=64)
    heavy = ("layers.6", "layers.7")
    pipe = split_traced(
        model, (rows(4, 64),), stages=2, weigh=lambda piece: float(piece.name.startswith(heavy))
    )
    first, second = names_by_stage(pipe.stages)
    assert "layers.5.2.weight" in first
    assert "layers.7.2.weight" in second


def test_a_value_is_sent_over_each_link_once_and_from_user_to_user() -> None:
    pipe = split_traced(SkipAndShared(), (rows(), rows()))
    assert pipe.dataflow.edges == ((0, 1), (0, 2), (1, 2), (2, 3))
    sent = pipe.stages[0](rows(), rows())
    assert {stage: type(value) for stage, value in sent.values.items()} == {
        1: torch.Tensor,
        2: torch.Tensor,
    }


def test_tied_weights_are_found_under_their_own_names_or_sent() -> None:
    torch.manual_seed(0)
    model = Tied()
    ids = torch.randint(8, (4, 3))
    at = {"layers.1": SplitPoint.BEGINNING, "head": SplitPoint.BEGINNING}
    replicated = split_traced(model, (ids,), at=at)
    assert [tie.places for tie in replicated.ties] == [((0, "embed.weight"), (2, "head.weight"))]
    transmitted = split_traced(model, (ids,), at=at, shared="transmit")
    assert transmitted.ties == ()
    assert names_by_stage(transmitted.stages)[2] == set()
    for pipe in (replicated, transmitted):
        model.zero_grad()
        plain = copy.deepcopy(model)
        pipe(ids).square().sum().backward()
        plain(ids).square().sum().backward()
        assert_same_gradients(model, plain)


def test_unused_parameters_stay_with_their_neighbours() -> None:
    at = {f"layers.{index}": SplitPoint.BEGINNING for index in (1, 2, 3)}
    pipe = split_traced(Tied(), (torch.zeros(2, 3, dtype=torch.int64),), at=at)
    assert "layers.2.spare" in pipe.stages[2].state_dict()


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("name", ["skip and shared", "made", "views written"])
def test_sizes_may_vary(name: str, count: int) -> None:
    model, args, _ = make(name)
    pipe = split_traced(model, args)
    given = [rows(count, seed=index) for index in range(len(args))]
    assert_same(pipe(*given), model(*given))


def test_a_linear_layer_of_the_model_is_called_as_a_module() -> None:
    model = SkipAndShared()
    pipe = split_traced(model, (rows(), rows()))
    assert pipe.stages[1].get_submodule("middle") is model.middle
    calls = [node.target for node in pipe.stages[1].graph.nodes if node.op == "call_module"]  # type: ignore[union-attr]  # a stage's graph
    assert calls == ["middle"]


def test_hooks_of_a_layer_are_not_run_twice() -> None:
    model = SkipAndShared()
    model.middle.register_forward_hook(lambda *given: given[-1] * 2)
    pipe = split_traced(model, (rows(), rows(seed=1)))
    assert_same(pipe(rows(), rows(seed=1)), model(rows(), rows(seed=1)))


@pytest.mark.filterwarnings("ignore:the backward of the stages")
@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_a_pipeline_gives_the_gradients_of_the_model(schedule: str) -> None:
    torch.manual_seed(0)
    model = SkipAndShared().double()
    plain = copy.deepcopy(model)
    x, y, target = (rows(8, seed=seed).double() for seed in range(3))
    pipe = split_traced(model, (x[:2], y[:2]))
    line = Pipeline(pipe, schedule, microbatches=4, loss=nn.functional.mse_loss)
    result = line.step(x, y, target=target)
    loss = nn.functional.mse_loss(plain(x, y), target)
    torch.autograd.backward(loss)
    assert result.loss == pytest.approx(loss.item())
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-12, atol=1e-14)


def test_boundaries_can_be_detached() -> None:
    model = Layers(4)
    pipe = split_traced(model, (rows(),), stages=2)
    output = pipe.run_detached(rows())
    output.sum().backward()
    assert model.layers[0][0].weight.grad is None  # type: ignore[index]  # a Sequential
    assert model.layers[3][0].weight.grad is not None  # type: ignore[index]  # a Sequential


def refusal(call: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as found:
        call()
    return str(found.value)


def split_layers_at(at: dict[str, SplitPoint]) -> Pipe:
    return split_traced(Layers(4), (rows(),), at=at)


def test_impossible_marks_are_refused_with_advice() -> None:
    begin, end = SplitPoint.BEGINNING, SplitPoint.END
    assert refusal(lambda: split_layers_at({"layer.2": begin}), ModelError) == (
        "the model has no module 'layer.2'; did you mean 'layers.2'?"
    )
    assert refusal(lambda: split_traced(Layers(4), (rows(),)), ModelError) == (
        "the traced model has no mark to cut at; call pipe_split() in its forward, give module "
        "paths (`at`) or a number of `stages`, or split it by layers: "
        'split(model, layers="layers", stages=4)'
    )
    assert refusal(
        lambda: split_layers_at({"layers.1": end, "layers.1.2": end}), ModelError
    ).startswith("stage 1 of 3 has nothing to do")
    assert refusal(lambda: split_traced(Layers(2), (rows(),), stages=50), SizeError).startswith(
        "stages must be 1 to "
    )


def test_arguments_that_contradict_each_other_are_refused() -> None:
    call = lambda: split_traced(Layers(2), (rows(),), at={"layers.1": SplitPoint.END}, stages=2)  # noqa: E731  # read once
    assert "not both" in refusal(call, ArgumentError)
    wrong: Any = "copy"
    assert "'copy'" in refusal(
        lambda: split_traced(Layers(2), (rows(),), stages=2, shared=wrong), ArgumentError
    )


def test_a_call_that_was_not_traced_is_refused() -> None:
    pipe = split_traced(Blocks(), (rows(3, 2, SIZE),), {"constant": rows(3, 2, SIZE)})
    assert refusal(lambda: pipe(rows(3, 2, SIZE)), BatchError).startswith(
        "the model was traced with the arguments x, constant (constant missing)"
    )
    assert refusal(lambda: pipe(rows(3, 5, SIZE), constant=rows(3, 5, SIZE)), BatchError) == (
        "x has size 5 in dimension 1, but the traced model takes 2 (in the example: 2); trace "
        "with an example of this size, and of at least 2 where the size is to vary"
    )


def test_a_buffer_that_microbatches_would_overtake_is_refused() -> None:
    class Late(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(SIZE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.count
            pipe_split()
            self.count.add_(1)
            return x * 2

    assert refusal(lambda: split_traced(Late(), (rows(),)), ModelError) == (
        "the buffer count is used in stage 0 and written to in stage 1, so microbatches would "
        "overtake each other; cut at another place"
    )


def test_a_buffer_that_a_later_stage_reads_is_sent_with_its_value_at_that_point() -> None:
    class Early(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(SIZE))
            self.layer = nn.Linear(SIZE, SIZE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            x = self.layer(x)
            pipe_split()
            return x * self.count

    model = Early()
    pipe = split_traced(model, (rows(),))
    first = pipe.stages[0](rows())
    pipe.stages[0](rows())
    assert_same(pipe.stages[1](*first), model.layer(rows()))
    assert_same(model.count, torch.full((SIZE,), 2.0))
