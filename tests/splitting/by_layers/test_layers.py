"""Splitting by layers: whatever the model does around its layers, the stages do it together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.random import get_rng_state

import penstock as ps
from penstock.errors import ModelError, SizeError
from penstock.splitting.by_layers.layers import even_sizes, split_layers
from tests.splitting import small
from tests.splitting.checking import assert_same_gradients, assert_same_names, squares
from tests.splitting.small import WIDTH, Block, Chain, numbers

Given = tuple[tuple[Any, ...], dict[str, Any]]
ONE: Given = ((numbers(8, WIDTH),), {})
TREE: Given = (
    (numbers(8, WIDTH), {"late": [numbers(8, WIDTH, seed=3)]}),
    {"mask": torch.ones(8, 1, dtype=torch.bool), "scale": 2.0, "unused": torch.zeros(8)},
)
CHAIN = ((0, 1), (1, 2), (2, 3))


@pytest.mark.parametrize(
    ("make", "given", "edges", "ties"),
    [
        (Chain, ((numbers(8, 3),), {}), CHAIN, 0),
        (small.Skips, ONE, (*CHAIN, (1, 3)), 0),
        (small.Everywhere, ONE, CHAIN, 0),
        (small.Token, ONE, CHAIN, 1),
        (small.Repeated, ONE, CHAIN, 2),
        (small.Swapped, ONE, CHAIN, 0),
        (small.Norms, ONE, CHAIN, 0),
        (small.TiedByHand, ((torch.arange(8) % 5,), {}), CHAIN, 1),
        (small.Parts, ONE, CHAIN, 0),
        (small.Nested, TREE, (*CHAIN, (0, 3)), 0),
        (small.Deciding, ((numbers(8, WIDTH), torch.ones(8, dtype=torch.bool)), {}), CHAIN, 0),
        (small.Inside, ONE, CHAIN, 2),
        (small.Aliased, ONE, CHAIN, 1),
        (small.Views, ONE, (*CHAIN, (0, 3), (1, 3)), 0),
    ],
)
def test_a_model_with_an_example_gives_its_gradients_over_the_fewest_links(
    make: Callable[[], nn.Module],
    given: Given,
    edges: tuple[tuple[int, int], ...],
    ties: int,
) -> None:
    torch.manual_seed(0)
    model = make()
    pipe = split_layers(model, ["layers"], 4, *given)
    assert pipe.dataflow.edges == tuple(sorted(edges))
    assert len(pipe.ties) == ties
    assert_same_names(model, pipe)
    assert torch.equal(_tensor(pipe(*given[0], **given[1])), _tensor(model(*given[0], **given[1])))
    assert_same_gradients(model, pipe, *given)


@pytest.mark.parametrize(
    ("depth", "stages"), [(d, s) for d in (1, 2, 3, 4) for s in (2, 3, 4, 8) if s <= 2 * d]
)
def test_skips_of_every_depth_over_every_number_of_stages(depth: int, stages: int) -> None:
    torch.manual_seed(depth)
    model = small.Skips(depth)
    pipe = split_layers(model, ["layers"], stages, *ONE)
    assert_same_names(model, pipe)
    assert_same_gradients(model, pipe, *ONE)


@pytest.mark.parametrize("make", [Chain, small.Repeated, small.Parts])
def test_a_plain_model_needs_no_example(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    given: Given = ((numbers(8, 3 if make is Chain else WIDTH),), {})
    pipe = split_layers(model, ["layers"], 4)
    assert pipe.dataflow.edges == CHAIN
    assert_same_names(model, pipe)
    assert_same_gradients(model, pipe, *given)


ADVICE = "split with example=, an example of such a call, so that each stage is sent what it needs"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            small.Skips,
            "the model's output depends on what 'layers.0' returned on an earlier stage, which "
            f"was not sent to stage 3; {ADVICE}",
        ),
        (
            small.Everywhere,
            "stage 2 needs what 'layers.1' returns, but it depends on what 'context' returned on "
            f"an earlier stage, which was not sent to stage 1; {ADVICE}",
        ),
        (
            small.Token,
            "stage 2 needs what 'layers.1' returns, but it depends on what 'token' returned on an "
            f"earlier stage, which was not sent to stage 1; {ADVICE}",
        ),
        (
            small.Swapped,
            "stage 0 holds 'layers.0', but a later stage's module was called before it; " + ADVICE,
        ),
        (
            small.Views,
            "aten.add_.Tensor writes what 'layers.0' returned, which another stage has; "
            + ADVICE
            + ", or, if there was one, write to a new tensor there or split the model by tracing",
        ),
    ],
)
def test_a_split_that_needs_an_example_says_so(
    make: Callable[[], nn.Module], message: str
) -> None:
    pipe = split_layers(make(), ["layers"], 4)
    with pytest.raises(ModelError) as caught:
        pipe(numbers(8, WIDTH))
    assert str(caught.value) == message


def test_layers_that_run_in_another_order_are_refused() -> None:
    with pytest.raises(ModelError, match=r"order of their lists \(got 'layers\.3' out of order\)"):
        split_layers(small.Reversed(), ["layers"], 4, *ONE)


@pytest.mark.parametrize("given", [(), ONE], ids=["plain", "example"])
def test_a_side_output_of_a_layer_is_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(ModelError, match="but not returned by it"):
        split_layers(small.SideOutput(), ["layers"], 2, *given)(numbers(8, WIDTH))


def test_layers_that_share_an_inner_value_must_be_on_one_stage() -> None:
    model = small.Sharing()
    with pytest.raises(
        ModelError,
        match=r"got stages \[0, 1\].* 'layers\.2' uses a value that was made in 'layers\.1'",
    ):
        split_layers(model, ["layers"], 2, *ONE)
    pipe = split_layers(model, ["layers"], [1, 3], *ONE)
    assert_same_gradients(model, pipe, *ONE)


# ---- how many layers a stage gets


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (30, 4, [8, 8, 7, 7]),
        (7, 2, [4, 3]),
        (61, 16, [4] * 13 + [3] * 3),
        (4, 4, [1, 1, 1, 1]),
        (5, 1, [5]),
    ],
)
def test_every_layer_is_on_one_stage(layers: int, stages: int, expected: list[int]) -> None:
    assert even_sizes(layers, stages) == expected
    model = Chain(layers)
    pipe = split_layers(model, ["layers"], stages)
    held = [
        sorted({int(name.split(".")[1]) for name in stage.state_dict() if "layers" in name})
        for stage in pipe.stages
    ]
    assert [len(numbers) for numbers in held] == expected
    assert [number for numbers in held for number in numbers] == list(range(layers))
    assert_same_names(model, pipe)
    assert torch.equal(pipe(numbers(2, 3)), model(numbers(2, 3)))


def test_fewer_layers_than_stages_are_refused_with_what_works() -> None:
    with pytest.raises(SizeError, match=r"stages must be 1 to 3, the number of layers \(got 4\)"):
        split_layers(Chain(3), ["layers"], 4)


@pytest.mark.parametrize("sizes", [[1, 3], [3, 1], [2, 1, 1], [4]])
def test_sizes_can_be_given(sizes: list[int]) -> None:
    model = Chain()
    pipe = split_layers(model, ["layers"], sizes)
    assert [
        sum(name.endswith("linear.weight") for name in s.state_dict()) for s in pipe.stages
    ] == sizes
    assert_same_gradients(model, pipe, (numbers(4, 3),))


@pytest.mark.parametrize("sizes", [[2, 3], [4, 0], [5, -1], []])
def test_sizes_that_do_not_add_up_are_refused(sizes: list[int]) -> None:
    with pytest.raises(
        SizeError, match="must be at least 1 and add up to 4, the number of layers"
    ):
        split_layers(Chain(), ["layers"], sizes)


# ---- which list


def test_a_sequential_is_its_own_list() -> None:
    model = nn.Sequential(*(Block() for _ in range(5)))
    pipe = split_layers(model, [""], 2)
    assert [sorted({key.split(".")[0] for key in s.state_dict()}) for s in pipe.stages] == [
        ["0", "1", "2"],
        ["3", "4"],
    ]
    assert_same_gradients(model, pipe, *ONE)


def test_a_dict_of_modules_is_a_list_of_layers() -> None:
    model = small.Named()
    pipe = split_layers(model, ["layers"], 2)
    assert [list(s.state_dict()) for s in pipe.stages] == [
        ["layers.first.linear.weight", "layers.first.linear.bias"],
        ["layers.second.linear.weight", "layers.second.linear.bias"],
    ]
    assert_same_gradients(model, pipe, *ONE)


# ---- what building changes


@pytest.mark.parametrize("given", [(), ONE], ids=["plain", "example"])
def test_building_changes_nothing(given: tuple[Any, ...]) -> None:
    torch.manual_seed(3)
    model = small.Counting()
    torch.autograd.backward(squares(model(*ONE[0])))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    random, modules = get_rng_state(), [_hooks_of(module) for module in model.modules()]
    split_layers(model, ["layers"], 4, *given)
    _assert_equal(model.state_dict(), state)
    _assert_equal({n: p.grad for n, p in model.named_parameters()}, gradients)
    assert torch.equal(get_rng_state(), random)
    assert [_hooks_of(module) for module in model.modules()] == modules


def test_an_example_that_fails_changes_nothing_either() -> None:
    model = small.Counting()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        split_layers(model, ["layers"], 4, (numbers(8, WIDTH + 1),), {})
    _assert_equal(model.state_dict(), state)
    assert all(_hooks_of(module) == (0, 0) for module in model.modules())


def test_the_model_still_runs_by_itself_after_its_stages_have() -> None:
    model = small.Skips()
    before = model(*ONE[0])
    pipe = split_layers(model, ["layers"], 4, *ONE)
    assert torch.equal(pipe(*ONE[0]), before)
    assert torch.equal(model(*ONE[0]), before)
    again = split_layers(model, ["layers"], 2, *ONE)
    assert torch.equal(again(*ONE[0]), before)
    assert torch.equal(pipe(*ONE[0]), before)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_counters_and_norms_count_once_per_microbatch(microbatches: int) -> None:
    torch.manual_seed(0)
    model = small.Counting()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    whole = small.Counting()
    whole.load_state_dict(expected)
    pipe = split_layers(model, ["layers"], 4, *ONE)
    pipeline = ps.Pipeline(pipe, "1F1B", microbatches=microbatches, loss=squares)
    for _ in range(2):
        pipeline.step(*ONE[0], target=torch.zeros(8))
        for part in ONE[0][0].chunk(microbatches):
            whole(part)
    _assert_equal(pipeline.state_dict(), whole.state_dict())
    assert pipe.state_dict()["calls"] == 2 * microbatches


# ---- inputs, however they are given


@pytest.mark.parametrize(
    "given",
    [
        TREE,
        (TREE[0][:1], {"extra": TREE[0][1], "scale": 2.0, "mask": TREE[1]["mask"]}),
        ((), {"mask": TREE[1]["mask"], "extra": TREE[0][1], "x": TREE[0][0]}),
        ((), {"extra": TREE[0][1], "x": TREE[0][0]}),
        ((*TREE[0],), {"mask": None}),
    ],
)
@pytest.mark.parametrize("has_example", [True, False])
def test_an_input_is_known_by_its_name_however_it_is_given(
    given: Given, has_example: bool
) -> None:
    torch.manual_seed(0)
    model = small.Nested()
    pipe = split_layers(model, ["layers"], 4, *(TREE if has_example else ()))
    found, expected = pipe(*given[0], **given[1]), model(*given[0], **given[1])
    assert torch.equal(found["out"], expected["out"])
    assert torch.equal(found["pair"][0], expected["pair"][0])
    assert (found["pair"][1], found["scale"]) == (None, expected["scale"])
    assert_same_gradients(model, pipe, *given)


def test_rows_and_lengths_may_change_from_step_to_step() -> None:
    torch.manual_seed(0)
    model = small.Skips()
    pipe = split_layers(model, ["layers"], 4, *ONE)
    pipeline = ps.Pipeline(pipe, "ZBV", microbatches=2, loss=squares)
    for rows, length in [(8, 3), (4, 5), (2, 1), (8, 3)]:
        batch = numbers(rows, length, WIDTH, seed=length)
        pipeline.step(batch, target=torch.zeros(rows))
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        torch.autograd.backward(squares(model(batch)))
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-12)
        model.zero_grad()


def _tensor(output: Any) -> torch.Tensor:
    result: torch.Tensor = output["out"] if isinstance(output, dict) else output
    return result


def _hooks_of(module: nn.Module) -> tuple[int, int]:
    return len(module._forward_hooks), len(module._forward_pre_hooks)


def _assert_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Asking(nn.Module):
    """Asks a module of its own for dtype and device, as towers of transformers are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(Block(), Block())
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tower(x)
        for layer in self.layers:
            x = layer(x)
        first = next(self.tower.parameters())
        buffers = list(self.tower.named_buffers())
        names = [name for name, _ in self.tower.named_parameters()]
        assert (names[0], len(names), buffers) == ("0.linear.weight", 4, [])
        return x.to(first.dtype).to(first.device)


@pytest.mark.parametrize("has_example", [False, True])
def test_a_module_of_another_stage_has_dtypes_and_devices(has_example: bool) -> None:
    # It once had no parameters, and the whole message was "StopIteration:".
    torch.manual_seed(0)
    model, x = Asking(), numbers(8, WIDTH)
    pipe = split_layers(model, ["layers"], 4, (x,) if has_example else None)
    assert_same_names(model, pipe)
    assert_same_gradients(model, pipe, (x,))


class Converting(Block):
    """A layer that converts what it gets to what it is already."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *_: object) -> Any:  # type: ignore[override]  # more arguments
        mask = nn.functional.dropout(mask.to(x.dtype).contiguous().type_as(x), 0.0)
        return super().forward(x) * mask


class Masked(nn.Module):
    """A model that uses a mask after its layers have converted it to what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Converting() for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x * mask


@pytest.mark.parametrize("has_example", [False, True])
def test_functions_that_return_what_they_got_make_nothing(has_example: bool) -> None:
    # The mask once counted as made in a layer, and was refused after it.
    torch.manual_seed(0)
    model, given = Masked(), (numbers(8, WIDTH), numbers(8, 1))
    pipe = split_layers(model, ["layers"], 4, given if has_example else None)
    assert_same_gradients(model, pipe, given)


class WithOwnExample(small.Everywhere):
    """A model that needs an example, and brings one."""

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": numbers(2, WIDTH)}


def test_a_model_with_an_example_of_its_own_needs_no_other() -> None:
    torch.manual_seed(0)
    model, x = WithOwnExample(), numbers(8, WIDTH)
    pipe = split_layers(model, ["layers"], 4)
    assert_same_gradients(model, pipe, (x,))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


class Heads(Chain):
    """Has a list beside its layers, but not with a module for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x) + self.heads[0](x) + self.heads[1](x)
        return result


def test_lists_that_may_run_between_the_layers_need_an_example_at_the_split() -> None:
    # LightGlue scores its words after each layer, and was refused in the first step.
    with pytest.raises(ModelError) as caught:
        split_layers(small.Norms(), ["layers"], 4)
    assert str(caught.value) == (
        "the model has other lists with as many modules as layers ('norms'), and only an example "
        "shows whether they run between the layers; give one (layers='auto', example_kwargs={...})"
    )
    torch.manual_seed(0)
    model = Heads()
    assert_same_gradients(model, split_layers(model, ["layers"], 4), (numbers(8, 3),))


class ReversedWithOwnExample(small.Reversed):
    """A model whose layers run in another order than that of their list, by its own example."""

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": numbers(2, WIDTH)}


def test_what_an_example_of_its_own_shows_to_be_impossible_is_refused_at_the_split() -> None:
    # It was split all the same, and the first step said to give an example, which does not help.
    with pytest.raises(ModelError, match="layers must run in the order of their lists"):
        split_layers(ReversedWithOwnExample(), ["layers"], 4)


def test_an_example_of_its_own_that_does_not_fit_is_left_out() -> None:
    class Unfit(Chain):
        dummy_inputs = {"words": torch.ones(2)}  # noqa: RUF012  # as a property would return it

    model = Unfit()
    assert_same_gradients(model, split_layers(model, ["layers"], 4), (numbers(8, 3),))
