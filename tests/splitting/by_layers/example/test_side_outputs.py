"""Side outputs of units are found; values that other stages can compute are not side outputs."""

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_layers.example.side_outputs import (
    SideOutputMode,
    SideOutputs,
    written_by,
)
from tests.splitting.small import Block, numbers

X = numbers(2, 6)


def run(
    side_outputs: SideOutputs, path: str | None, compute: object, *given: torch.Tensor
) -> torch.Tensor:
    side_outputs.enter(given)
    with SideOutputMode(side_outputs, lambda: path):
        result: torch.Tensor = compute(*given)  # type: ignore[operator]  # some function
    return result


def test_values_from_parameters_or_arguments_are_side_outputs() -> None:
    side_outputs = SideOutputs()
    for made in (run(side_outputs, "a", Block(), X), run(side_outputs, "a", torch.sin, X)):
        with pytest.raises(ModelError, match="the model returns a value that was made in 'a'"):
            side_outputs.refuse([made], "the model returns")
        side_outputs.refuse([X], "the model returns")


def test_returned_values_and_what_is_computed_from_them_are_allowed() -> None:
    side_outputs = SideOutputs()
    made = run(side_outputs, "a", Block(), X)
    side_outputs.allow((made,))
    side_outputs.refuse(run(side_outputs, None, torch.sin, made), "the model returns")


def test_a_value_computed_from_a_side_output_is_one() -> None:
    side_outputs = SideOutputs()
    made = run(side_outputs, None, torch.sin, run(side_outputs, "a", torch.sin, X))
    with pytest.raises(ModelError, match="made in 'a'"):
        side_outputs.refuse(made, "the model returns")


def test_a_table_that_depends_on_nothing_is_allowed() -> None:
    side_outputs = SideOutputs()
    side_outputs.refuse(run(side_outputs, "a", lambda: torch.arange(4).cos()), "the model returns")


def test_a_unit_that_uses_a_side_output_of_another_is_recorded() -> None:
    side_outputs = SideOutputs()
    inner = run(side_outputs, "a", torch.sin, X)
    run(side_outputs, "b", lambda x: x + inner, X)
    run(side_outputs, "a", lambda x: x + inner, X)
    assert side_outputs.inner_uses == {("a", "b")}


@pytest.mark.parametrize(
    ("func", "is_written"),
    [
        (torch.Tensor.add_, True),
        (torch.Tensor.__setitem__, True),
        (torch.Tensor.__iadd__, True),
        (torch.Tensor.add, False),
        (torch.Tensor.__index__, False),
        (torch.Tensor.__invert__, False),
        (nn.init.zeros_, True),
    ],
)
def test_writing_is_known_by_name(func: object, is_written: bool) -> None:
    assert bool(written_by(func, (X, 1))) is is_written
