"""Messages about a save survive JSON unchanged, and background work can be abandoned."""

import json
from threading import Event

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from penstock.checkpoint.background import Background
from penstock.checkpoint.drafts import HostCopies
from penstock.checkpoint.messages import (
    Written,
    plan_from_values,
    plan_to_values,
    setting_from_value,
    setting_to_value,
)
from penstock.ranks.faults import LinkLostError

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text('ab.\u00e9"', min_size=1), max_size=6, unique=True))
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return {name: torch.zeros(draw(shapes), dtype=draw(st.sampled_from(DTYPES))) for name in names}


@given(held=tensors())
def test_plan_survives_json_unchanged(held: dict[str, torch.Tensor]) -> None:
    planner = HostCopies()
    planner.set_up_planner({"model": held})
    plan = planner.create_local_plan()
    assert plan_from_values(json.loads(json.dumps(plan_to_values(plan)))) == plan


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(setting=SCALARS | st.lists(SCALARS) | st.lists(SCALARS).map(tuple))
def test_setting_of_an_optimizer_keeps_its_type(setting: object) -> None:
    value = json.loads(json.dumps(setting_to_value(setting)))
    assert repr(setting_from_value(value)) == repr(setting)


@pytest.mark.parametrize("offset", [None, torch.Size([]), torch.Size([2, 0])])
def test_written_item_survives_json_unchanged(
    offset: torch.Size | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A position in a file, as torch's writer makes them.
    planner = HostCopies()
    planner.set_up_planner({"model": {"weight": torch.ones(2, 3)}})
    writer = FileSystemWriter(tmp_path_factory.mktemp("save"))
    (plan,) = writer.prepare_global_plan([planner.create_local_plan()])
    (real,) = writer.write_data(planner.finish_plan(plan), planner).wait()
    result = WriteResult(MetadataIndex("model.weight", offset), 24, real.storage_data)
    item = Written(result, None if offset is None else 64)
    assert Written.from_values(json.loads(json.dumps(item.to_values()))) == item


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
