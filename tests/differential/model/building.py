"""The model of a case: as one, in the parts that users change, named as by a pipeline."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from tests.differential.case import Case
from tests.differential.model.blocks import first_linear
from tests.differential.model.parts import Whole, make_part
from tests.differential.model.stacked import Stacked

__all__ = ["SPLIT_DOORS", "Model", "in_double", "make_model"]

# The doors behind which Penstock cuts a model.
SPLIT_DOORS = ("layers", "traced")


@dataclass(frozen=True, slots=True)
class Model:
    """A model: `whole` is called, `parts` are what users change, `named` has names."""

    whole: Whole | Stacked
    parts: tuple[nn.Module, ...]
    head: nn.Linear
    named: tuple[tuple[str, nn.Module], ...]


def make_model(case: Case, output: str) -> Model:
    """The model of a case, with the same numbers at every call."""
    with torch.random.fork_rng(devices=[]), in_double():
        torch.manual_seed(case.seed)
        if case.door in SPLIT_DOORS:
            stacked = Stacked(case, output)
            pieces = tuple(stacked.part(number) for number in range(len(case.parts)))
            return Model(stacked, pieces, stacked.head, (("", stacked),))
        parts = tuple(make_part(case, number, output) for number in range(len(case.parts)))
    for first, second in case.ties:
        _tie(parts[first], parts[second])
    head = parts[-1].core.head
    assert head is not None, "the last part has a head"
    named = tuple((f"{number}.", part) for number, part in enumerate(parts))
    return Model(Whole(parts, case.edges), parts, head, named)


@contextmanager
def in_double() -> Iterator[None]:
    """Make new tensors in float64; casting modules later would come after their hooks."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _tie(first: nn.Module, second: nn.Module) -> None:
    """Let the first linear layers of two parts have one weight."""
    here, there = first_linear(first), first_linear(second)
    assert here is not None, "ties are between parts with linear layers"
    assert there is not None, "ties are between parts with linear layers"
    there.weight = here.weight
