"""Fingerprints tell data apart whatever it looks like, and nothing else."""

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from penstock.step.microbatches import Along, Ready, Shared
from penstock.training.batch.fingerprint import fingerprints


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def digest(value: Any) -> str:
    return fingerprints({"x": value})["x"].digest


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


VALUES: dict[str, Any] = {
    "a number": lambda seed: seed,
    "a text": lambda seed: f"step {seed}",
    "a scalar": lambda seed: torch.tensor(seed),
    "a matrix": lambda seed: noise(7, 5, seed=seed),
    "half precision": lambda seed: noise(7, 5, seed=seed, dtype=torch.bfloat16),
    "eight bits": lambda seed: noise(7, 5, seed=seed).to(torch.float8_e4m3fn),
    "truth": lambda seed: noise(7, 50, seed=seed) > 50,
    "complex": lambda seed: torch.complex(noise(7, 5), noise(7, 5, seed=seed)),
    "a lazy conjugate": lambda seed: torch.complex(noise(7, 5), noise(7, 5, seed=seed)).conj(),
    "complex doubles": lambda seed: torch.complex(noise(3).double(), noise(3, seed=seed).double()),
    "a transposed view": lambda seed: noise(300, 40, seed=seed).T,
    "an expanded row": lambda seed: noise(1, 500, seed=seed).expand(100, 500),
    "a parameter": lambda seed: nn.Parameter(noise(3, seed=seed)),
    "a tree": lambda seed: {"a": [torch.zeros(3), (noise(3, seed=seed), 2)]},
    "a mapping": lambda seed: UserDict(a=noise(3, seed=seed)),
    "a named tuple": lambda seed: Pair(torch.zeros(3), noise(3, seed=seed)),
    "ready parts": lambda seed: Ready([torch.zeros(3), noise(2, seed=seed), None]),
    "along": lambda seed: Along(noise(3, 4, seed=seed), 1),
    "shared": lambda seed: Shared(noise(3, 4, seed=seed)),
    "nothing and not a number": lambda seed: torch.tensor([float("nan"), float(seed)]),
}


@pytest.mark.parametrize("name", VALUES)
def test_equal_data_has_one_fingerprint_and_other_data_another(name: str) -> None:
    make = VALUES[name]
    assert digest(make(1)) == digest(make(1))
    assert digest(make(1)) != digest(make(2))


def test_form_is_part_of_the_fingerprint() -> None:
    x = torch.zeros(4, 6)
    others = [x.double(), x.reshape(6, 4), Shared(x), Ready([x]), Along(x, 1), [x], {"a": x}]
    assert len({digest(value) for value in (x, *others)}) == 1 + len(others)


def test_argument_that_is_left_out_or_none_has_no_fingerprint() -> None:
    found = fingerprints({"x": torch.zeros(0, 3), "labels": None, "scale": 2.0})
    assert {name: one.form for name, one in found.items()} == {
        "x": "(0, 3) torch.float32",
        "scale": "2.0",
    }


def test_tensor_without_readable_numbers_is_known_by_its_form() -> None:
    assert digest(torch.eye(3).to_sparse()) == digest(torch.zeros(3, 3).to_sparse())
    assert digest(torch.empty(3, device="meta")) == digest(torch.empty(3, device="meta"))
    assert digest(object()) == digest(object())


# Texts begin with the same token in every row: elements in even distances may all be those.
def test_rows_that_begin_alike_have_different_fingerprints() -> None:
    one, other = noise(256, 4096, seed=1), noise(256, 4096, seed=2)
    one[:, 0] = other[:, 0] = 1
    assert digest(one) != digest(other)


def test_a_fingerprint_neither_changes_a_tensor_nor_joins_its_graph() -> None:
    x = noise(4, 4).requires_grad_()
    before = x._version
    digest(x)
    assert x._version == before
    assert x.grad_fn is None
    assert x.grad is None


def test_long_forms_are_shortened() -> None:
    form = fingerprints({"x": list(range(1000))})["x"].form
    assert len(form) == 83
    assert form.startswith("[0, 1, 2")
    assert form.endswith("...")
    assert digest(list(range(1000))) != digest([*range(999), 0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", VALUES)
def test_the_device_makes_no_difference(name: str) -> None:
    value = VALUES[name](1)
    moved = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, value)
    assert digest(moved) == digest(value)
