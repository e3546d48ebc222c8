"""One run on an example shows what every call of a unit depends on."""

from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_layers.example.dependencies import find_dependencies
from penstock.splitting.by_layers.example.value_tracker import Call, Dependencies
from penstock.splitting.by_layers.records.call_records import INPUTS, Value
from penstock.splitting.by_layers.units import find_units
from tests.splitting import small
from tests.splitting.small import WIDTH, numbers

X = numbers(4, WIDTH)


def find(model: nn.Module, *args: object) -> Dependencies:
    return find_dependencies(model, find_units(model, ["layers"]), args or (X,), {})


def layer(number: int) -> Value:
    return Value(f"layers.{number}", 0, "")


def given(name: str) -> Value:
    return Value(INPUTS, 0, name)


def test_calls_come_in_order_with_what_they_use() -> None:
    dependencies = find(small.Skips())
    assert dependencies.calls == [
        Call("layers.0", 0, frozenset([given("x")])),
        Call("layers.1", 0, frozenset([layer(0)])),
        Call("layers.2", 0, frozenset([layer(1)])),
        Call("layers.3", 0, frozenset([layer(2), layer(0)])),
    ]
    assert dependencies.output == {layer(3)}
    assert (dependencies.decisions, dependencies.written, dependencies.inner_uses) == (
        frozenset(),
        {},
        frozenset(),
    )


def test_parameters_that_are_used_outside_of_calls_are_values() -> None:
    token = Value("token", 0, "")
    dependencies = find(small.Token())
    assert dependencies.calls[0].uses == {given("x"), token}
    assert dependencies.output == {layer(3), token}
    dependencies = find(small.TiedByHand(), torch.arange(4))
    assert dependencies.output == {layer(3), Value("embed.weight", 0, "")}


def test_repeated_calls_are_numbered() -> None:
    dependencies = find(small.Repeated())
    assert [(call.path, call.number) for call in dependencies.calls] == [
        ("layers.0", 0),
        ("layers.1", 0),
        ("layers.0", 1),
        ("layers.0", 2),
    ]


def test_branches_and_sizes_that_depend_on_values_are_decisions() -> None:
    dependencies = find(small.Deciding(), X, torch.ones(4, dtype=torch.bool))
    assert dependencies.decisions == {given("switch"), layer(1)}


class Picking(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([small.Block()])
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        match self.how:
            case "item":
                x = x + x.sum().item()
            case "list":
                x = x + x.sum(1).tolist()[0]
            case "array":
                x = x + float(x.numpy().sum())
            case "mask":
                x = x[x[:, 0] > 0]
            case "numbers":
                x = x[torch.arange(2)]
            case "equal":
                x = x + 1 if torch.equal(x, x) else x
            case "unique":
                x = torch.unique_consecutive(x)
            case "bincount":
                x = torch.bincount(x.flatten().long().abs())
            case "count":
                x = torch.bincount(x.flatten().long().abs(), minlength=99)
        return x


@pytest.mark.parametrize("how", ["item", "list", "array", "mask", "equal", "unique", "bincount"])
def test_every_way_to_read_values_is_a_decision(how: str) -> None:
    assert find(Picking(how)).decisions == {layer(0)}


def test_indexing_by_numbers_is_not_a_decision() -> None:
    assert find(Picking("numbers")).decisions == frozenset()


def test_counts_of_a_known_length_are_needed_everywhere_but_decide_nothing() -> None:
    # Tokens per expert are counted so, also of a model without memory, in which torch cannot.
    found = find(Picking("count"))
    with torch.device("meta"):
        model = Picking("count")
    for dependencies in (found, find(model)):
        assert dependencies.counts == {layer(0)}
        assert dependencies.decisions == frozenset()


def test_a_write_to_a_view_counts_for_the_whole_tensor() -> None:
    # The whole was made like the input, whose shape it has.
    assert find(small.Views()).output == {given("x"), *(layer(number) for number in range(4))}


def test_buffers_that_are_written_to_are_recorded_with_the_values() -> None:
    dependencies = find(small.Counting())
    own = {name: Value(name, 0, "") for name in ("calls", "average")}
    assert dependencies.written == {
        "calls": {own["calls"]},
        "average": {own["average"], Value("norm", 0, "")},
    }


def test_units_that_share_an_inner_value_are_recorded() -> None:
    assert find(small.Sharing()).inner_uses == {("layers.1", "layers.2")}


def test_a_model_on_the_meta_device_is_run_there() -> None:
    with torch.device("meta"):
        model = small.Skips()
    assert find(model).calls == find(small.Skips()).calls


class Looking(nn.Module):
    """Looks at the values of its mask, in a layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counting(), small.Block()])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        result: torch.Tensor = self.layers[1](x, mask) if mask.any() else x
        return result


class Counting(small.Block):
    """A layer that looks at the values of its input."""

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        return super().forward(x) + int((x > 0).sum().item())


def test_a_model_on_the_meta_device_may_look_at_the_values_of_its_inputs() -> None:
    # Tensor.item() has no answer on the meta device, so the example was once refused.
    with torch.device("meta"):
        model = Looking()
    mask = torch.ones(4, 1, dtype=torch.bool)
    found, expected = find(model, X, mask), find(Looking(), X, mask)
    assert found.calls == expected.calls
    assert found.decisions == expected.decisions == {given("mask")}
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


class ByHand(Looking):
    """Multiplies by a parameter of a layer outside of its call, after it looked at its mask."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        layer: Any = self.layers[1]
        result: torch.Tensor = super().forward(x, mask) + mask * layer.linear.weight[0]
        return result


def test_parameters_of_units_may_be_used_outside_on_the_meta_device_too() -> None:
    # They stayed without values there, and met tensors that have some.
    with torch.device("meta"):
        model = ByHand()
    mask = torch.ones(4, 1, dtype=torch.bool)
    found, expected = find(model, X, mask), find(ByHand(), X, mask)
    assert (found.calls, found.output) == (expected.calls, expected.output)
    assert Value("layers.1.linear.weight", 0, "") in found.output
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_decision_by_what_a_unit_returns_is_refused_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = small.Deciding()
    with pytest.raises(ModelError, match=r"depends on values \(of what 'layers.1' returns"):
        find(model, X, torch.ones(4, dtype=torch.bool))


class Twice(nn.Module):
    """Its first layer returns one tensor under two names, its second what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pair(), Same(), small.Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers[0](x)
        self.layers[1](second)
        result: torch.Tensor = self.layers[2](first)
        return result


class Pair(small.Block):
    def forward(self, x: torch.Tensor, *_: object) -> Any:
        y = super().forward(x)
        return y, y


class Same(small.Block):
    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        return x


def test_a_tensor_with_several_names_is_known_by_all_of_them() -> None:
    # The last name alone was once recorded, and the first was then missing where it was used.
    names = {Value("layers.0", 0, "[0]"), Value("layers.0", 0, "[1]"), layer(1)}
    assert find(Twice()).calls[2].uses == names


class Mapped(nn.Module):
    """Adds a mask that is computed under `torch.vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([small.Block(), small.Block()])

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        rows = torch.vmap(lambda row: keep[row] * 2.0)(torch.arange(len(x)))
        result: torch.Tensor = self.layers[1](x * rows[:, None])
        return result


def test_values_are_followed_through_vmap() -> None:
    assert find(Mapped(), X, torch.ones(4)).calls[1].uses == {layer(0), given("keep")}


def test_outputs_of_the_example_are_not_kept_alive() -> None:
    # Every tensor between units was once held until the end of the run, masks of all lengths too.
    model = small.Skips()
    units = find_units(model, ["layers"])
    alive: list[int] = []
    seen: list[torch.utils.weak.TensorWeakRef] = []

    def watch(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(torch.utils.weak.TensorWeakRef(output))

    handle = model.get_submodule("layers.3.linear").register_forward_hook(watch)
    other = model.get_submodule("layers.0.linear").register_forward_hook(watch)
    find_dependencies(model, units, (X,), {})
    handle.remove()
    other.remove()
    assert alive == [0, 0]
