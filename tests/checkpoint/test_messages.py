"""Messages about a save survive JSON unchanged, and background work can be abandoned."""

import json
from threading import Event

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.background import Background
from penstock.checkpoint.parts import list_parts
from penstock.checkpoint.saving.offers import Offer, setting_from_value, setting_to_value
from penstock.ranks.faults import LinkLostError

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text('ab.\u00e9"', min_size=1), max_size=6, unique=True))
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return {name: torch.zeros(draw(shapes), dtype=draw(st.sampled_from(DTYPES))) for name in names}


@given(held=tensors())
def test_offer_survives_json_unchanged(held: dict[str, torch.Tensor]) -> None:
    values = {"optim.param_groups.a.betas": (0.9, 0.999), "pipeline.random_step": 3}
    offer = Offer(4, "{}", "torch.optim.Adam", tuple(list_parts(held)), values, {"b": "a"})
    assert Offer.from_values(json.loads(json.dumps(offer.to_values()))) == offer


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(setting=SCALARS | st.lists(SCALARS) | st.lists(SCALARS).map(tuple))
def test_setting_of_an_optimizer_keeps_its_type(setting: object) -> None:
    value = json.loads(json.dumps(setting_to_value(setting)))
    assert repr(setting_from_value(value)) == repr(setting)


def test_waiting_for_background_work_raises_its_error() -> None:
    def fail() -> None:
        raise ValueError("a mistake")

    Background(lambda: None, "succeeds", fail).wait()
    with pytest.raises(ValueError, match="a mistake"):
        Background(fail, "fails", fail).wait()


def test_waiting_for_abandoned_work_raises() -> None:
    may_end = Event()

    def work() -> None:
        may_end.wait()

    background = Background(work, "slow", may_end.set)
    background.abandon()
    with pytest.raises(LinkLostError, match="abandoned"):
        background.wait()
    may_end.set()
    background.end()
