"""Stand-ins have shapes but no values, and using their values is an error."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import functional

from penstock.errors import ModelError
from penstock.splitting.by_layers.stand_ins import ADVICE, StandIn, stand_in

CPU = torch.device("cpu")


def make(*shape: int, dtype: torch.dtype = torch.float32, source: str = "layers.0") -> StandIn:
    return stand_in(shape, dtype, CPU, source)


@pytest.mark.parametrize(
    ("compute", "shape", "dtype"),
    [
        (lambda x: x + 1, (2, 3), torch.float32),
        (lambda x: x @ torch.ones(3, 4), (2, 4), torch.float32),
        (lambda x: torch.ones(5, 2) @ x, (5, 3), torch.float32),
        (lambda x: x[:, 1:].transpose(0, 1), (2, 2), torch.float32),
        (lambda x: x.to(torch.bfloat16), (2, 3), torch.bfloat16),
        (lambda x: torch.cat([x, torch.ones(1, 3)]), (3, 3), torch.float32),
        (lambda x: x.new_zeros(4), (4,), torch.float32),
        (lambda x: functional.layer_norm(x, (3,)), (2, 3), torch.float32),
        (lambda x: x.add_(1), (2, 3), torch.float32),
        (lambda x: functional.dropout(x, 0.5), (2, 3), torch.float32),
        (lambda x: x.max(1).indices, (2,), torch.int64),
        (lambda x: functional.scaled_dot_product_attention(x, x, x), (2, 3), torch.float32),
    ],
)
def test_a_result_computed_from_a_stand_in_is_a_stand_in(
    compute: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = compute(make(2, 3))
    assert isinstance(found, StandIn)
    assert (tuple(found.shape), found.dtype, found.device) == (shape, dtype, CPU)
    assert found.sources == {"layers.0"}


def test_a_stand_in_knows_all_modules_that_it_depends_on() -> None:
    found = make(2, source="embed") * make(2, source="layers.1")
    assert isinstance(found, StandIn)
    assert found.sources == {"embed", "layers.1"}
    assert repr(found) == "StandIn((2,), torch.float32, from embed, layers.1)"


def test_writing_to_a_stand_in_returns_the_same_one() -> None:
    value = make(2, 3)
    assert value.mul_(2) is value
    value[:, 0] = torch.ones(2)
    assert tuple(value.shape) == (2, 3)


def test_dropout_of_a_stand_in_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    functional.dropout(make(2, 3), 0.5)
    torch.rand_like(make(2, 3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.item(),
        lambda x: float(x),
        lambda x: bool(x),
        lambda x: int(x),
        lambda x: x.nonzero(),
        lambda x: x.expand(3)[torch.ones(3, dtype=torch.bool) & (x > 0)],
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, torch.ones(())),
    ],
)
def test_reading_values_names_the_module_and_the_advice(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(ModelError) as caught:
        ask(make())
    assert "needs the values of what 'layers.0' returned, which another stage has" in str(
        caught.value
    )
    assert str(caught.value).endswith(ADVICE)


def test_a_real_tensor_is_not_written_to() -> None:
    real = torch.zeros(2)
    with pytest.raises(ModelError) as caught:
        real.add_(make(2))
    assert str(caught.value) == (
        f"aten.add_.Tensor writes what 'layers.0' returned, which another stage has; {ADVICE}"
        ", or, if there was one, write to a new tensor there or split the model by tracing"
    )
    assert torch.equal(real, torch.zeros(2))


def test_a_copy_is_a_stand_in() -> None:
    found = deepcopy(make(2, 3))
    assert isinstance(found, StandIn)
    assert (tuple(found.shape), found.sources) == ((2, 3), frozenset(["layers.0"]))


def test_a_moved_stand_in_has_the_new_device() -> None:
    assert make(2).to("meta").device == torch.device("meta")
    assert make(2).device == CPU
