"""Values as plain data and tensors: what comes back, and what is refused, by its place."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock.errors import BoundaryError
from penstock.integrations.encoding import decode, encode
from penstock.tensors.tree import flatten, unflatten

ONES = torch.ones(2)


@dataclass(frozen=True)
class Frozen:
    """A dataclass with a value that its constructor would refuse."""

    logits: torch.Tensor
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        raise AssertionError("decoding calls no constructor")


@dataclass(slots=True)
class Slotted:
    hidden: Any = None
    width: int = 3


class Pair(NamedTuple):
    first: Any
    second: Any


Old = namedtuple("Old", "a b")  # such classes exist


class Named(dict[str, Any]):
    """A mapping of a class of its own."""


class Wrapped(UserDict[str, Any]):
    """A mapping that has a dict."""


class Colour(IntEnum):
    RED = 2


def there_and_back(value: Any) -> Any:
    # As it travels: JSON and a list of tensors.
    return decode(unflatten(*flatten(encode(value, "outputs"))))


def frozen(logits: torch.Tensor) -> Frozen:
    made = object.__new__(Frozen)
    object.__setattr__(made, "logits", logits)
    object.__setattr__(made, "notes", ("a", "b"))
    return made


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        0.1,
        float("inf"),
        "säge \ud800",
        [],
        (),
        {},
        [1, (2, [3, {"x": None, 4: (5,), None: False}])],
        Path("a") / "b",
        {"a": OrderedDict(x=1, y=[2])},
        Slotted([1], 4),
        Pair(Pair(1, "x"), None),
        Old(1, 2),
        Named(x=1),
        Wrapped(x=(1, 2)),
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_tensors_come_back_wherever_they_are() -> None:
    sent = frozen(ONES)
    found = there_and_back([sent, Pair(ONES, {"t": ONES * 2})])
    assert type(found[0]) is Frozen
    assert found[0].notes == ("a", "b")
    assert found[0].logits.tolist() == [1, 1]
    assert found[1].second["t"].tolist() == [2, 2]


def test_an_output_of_transformers_has_its_class_items_and_attributes() -> None:
    tensors: Any = {"logits": ONES, "hidden_states": (ONES, ONES * 2)}
    sent = CausalLMOutputWithPast(**tensors)
    found = there_and_back(sent)
    assert type(found) is CausalLMOutputWithPast
    assert list(found) == ["logits", "hidden_states"]
    assert found.logits is found["logits"] is found[0]
    assert found["hidden_states"][1].tolist() == [2, 2]
    assert found.loss is None
    # A tensor that is an item and an attribute travels once.
    assert len(flatten(encode(sent, "outputs"))[1]) == 3


def test_other_kinds_of_numbers_are_sent_as_plain_ones() -> None:
    found = there_and_back([Colour.RED, np.float32(0.5), np.int64(3), np.bool_(True)])
    assert [type(value) for value in found] == [int, float, int, bool]
    assert found == [2, 0.5, 3, True]


def test_graphs_and_parameters_do_not_travel() -> None:
    parameter = torch.nn.Parameter(ONES)
    first, second = there_and_back([parameter, parameter * 2])
    assert type(first) is torch.Tensor
    assert not first.requires_grad
    assert second.grad_fn is None


def test_a_tensor_that_is_computed_when_it_is_read_is_computed() -> None:
    (found,) = there_and_back([torch.tensor([1j]).conj()])
    assert not found.is_conj()


class Local:
    """A class with anything in it."""


def make_local_class() -> Any:
    @dataclass
    class Inner:
        x: int

    return Inner(1)


class View(Mapping[str, int]):
    """A mapping of no known kind."""

    def __getitem__(self, key: str) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("value", "place", "what"),
    [
        ({"seen": {1}}, r"outputs\['seen'\]", "got set"),
        ([1, Pair(1, Local())], r"outputs\[1\]\.second", "got Local"),
        (Slotted(hidden=[b"x"]), r"outputs\.hidden\[0\]", "got bytes"),
        (View(), "outputs", "got View"),
        ((1, make_local_class()), r"outputs\[1\]", "got make_local_class.<locals>.Inner"),
        ({(1, 2): 3}, "outputs", r"got \(1, 2\)"),
        ([1j], r"outputs\[0\]", "got complex"),
        ([torch.eye(2).to_sparse()], r"outputs\[0\]", "layout torch.sparse_coo"),
        ([torch.empty(1, device="meta")], r"outputs\[0\]", "on meta"),
        (np.ones(2), "outputs", "got ndarray"),
        (print, "outputs", "got builtin_function_or_method"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_place(value: Any, place: str, what: str) -> None:
    with pytest.raises(BoundaryError, match=f"^{place} must .*{what}"):
        encode(value, "outputs")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("os", "_Environ"),
        ("no.such.module", "Thing"),
        ("subprocess", "Popen"),
        ("builtins", "object"),
        (__name__, "Local"),
        (__name__, "make_local_class.<locals>.Inner"),
    ],
)
def test_only_known_kinds_of_imported_classes_are_found(module: str, name: str) -> None:
    # What another process sends may name anything; nothing of it is imported or called.
    with pytest.raises(BoundaryError, match=f"got {module}.{name}"):
        decode(["class", module, name, [], []])


@pytest.mark.parametrize("data", [["call", "x"], ["list"], {}, ["path", 1], ["class", "a", "b"]])
def test_anything_else_is_refused(data: Any) -> None:
    with pytest.raises(BoundaryError, match="must be what was encoded"):
        decode(data)
