"""Values that leave a unit by the back door are found; what others can make again is not one."""

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_layers.example.side_outputs import (
    SideOutputs,
    SideOutputWatch,
    written_by,
)
from tests.splitting.small import Block, numbers

X = numbers(2, 6)


def run(
    leaks: SideOutputs, path: str | None, compute: object, *given: torch.Tensor
) -> torch.Tensor:
    leaks.enter(given)
    with SideOutputWatch(leaks, lambda: path):
        result: torch.Tensor = compute(*given)  # type: ignore[operator]  # some function
    return result


def test_what_came_from_parameters_or_from_what_was_given_is_refused() -> None:
    leaks = SideOutputs()
    for made in (run(leaks, "a", Block(), X), run(leaks, "a", torch.sin, X)):
        with pytest.raises(ModelError, match="the model returns a value that was made in 'a'"):
            leaks.refuse([made], "the model returns")
        leaks.refuse([X], "the model returns")


def test_what_is_returned_is_forgiven_and_so_is_what_comes_from_it() -> None:
    leaks = SideOutputs()
    made = run(leaks, "a", Block(), X)
    leaks.forgive((made,))
    leaks.refuse(run(leaks, None, torch.sin, made), "the model returns")


def test_what_is_computed_from_a_leak_is_one() -> None:
    leaks = SideOutputs()
    made = run(leaks, None, torch.sin, run(leaks, "a", torch.sin, X))
    with pytest.raises(ModelError, match="made in 'a'"):
        leaks.refuse(made, "the model returns")


def test_a_table_that_depends_on_nothing_is_none() -> None:
    leaks = SideOutputs()
    leaks.refuse(run(leaks, "a", lambda: torch.arange(4).cos()), "the model returns")


def test_a_unit_that_uses_the_inside_of_another_is_bound_to_it() -> None:
    leaks = SideOutputs()
    inner = run(leaks, "a", torch.sin, X)
    run(leaks, "b", lambda x: x + inner, X)
    run(leaks, "a", lambda x: x + inner, X)
    assert leaks.bonds == {("a", "b")}


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
