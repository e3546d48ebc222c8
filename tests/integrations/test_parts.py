"""A folder that is saved to again has the new state, whatever run has written to it before."""

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import CheckpointError
from penstock.integrations.parts import load_parts, save_parts


def make_pipeline(value: float) -> ps.Pipeline:
    stages = [nn.Linear(2, 2) for _ in range(2)]
    for stage in stages:
        nn.init.constant_(stage.weight, value)
    return ps.Pipeline(stages, "1F1B", microbatches=2, loss=nn.MSELoss())


def test_a_second_run_into_the_same_folder_is_what_is_loaded(tmp_path: Path) -> None:
    # The step of the first run was there already, so that the second one's was not saved.
    folder = tmp_path / "checkpoint-8" / "pipeline"
    for value in (1.0, 2.0, 3.0):
        save_parts(folder, 8, make_pipeline(value), None, is_first=True)
    save_parts(folder, 4, make_pipeline(4.0), None, is_first=True)
    found = make_pipeline(0.0)
    load_parts(folder, found, None)
    torch.testing.assert_close(found.full_state_dict()["0.weight"], torch.full((2, 2), 4.0))
    assert [path.name for path in folder.parent.iterdir()] == ["pipeline"]


def test_a_folder_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no complete step"):
        load_parts(tmp_path, make_pipeline(0.0), None)
