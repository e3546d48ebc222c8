"""Scripts with the trainers of other libraries: over processes they train what they do in one."""

import csv
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.examples.commands import SCRIPTS, losses_of, run_all

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file


class Run(NamedTuple):
    """Where a script ran, and what it printed."""

    folder: Path
    output: str


@dataclass(frozen=True)
class Example:
    """How a script becomes one of the library alone, and what it writes.

    A run that ends early, by `early`, leaves `state` after half of the steps, from which another
    is resumed with `argument`.
    """

    name: str
    plain: Mapping[str, str]
    state: str
    argument: str
    early: Mapping[str, str] = field(default_factory=dict)
    model: str = "trained"

    def values_of(self, run: Run) -> list[float]:
        """Return the losses of all steps and evaluations in between, in their order."""
        return losses_of(run.output)


class TrainerExample(Example):
    def values_of(self, run: Run) -> list[float]:
        state = run.folder / "trained" / "checkpoint-20" / "trainer_state.json"
        history = json.loads(state.read_text())["log_history"]
        # Steps were clipped.
        assert max(entry.get("grad_norm", 0) for entry in history) > 0.5
        return [entry[k] for entry in history for k in ("loss", "eval_loss") if k in entry]


class LightningExample(Example):
    def values_of(self, run: Run) -> list[float]:
        (file,) = run.folder.glob("lightning_logs/version_*/metrics.csv")
        rows = csv.DictReader(file.read_text().splitlines())
        return [float(row[key]) for row in rows for key in ("loss", "held") if row[key]]


EXAMPLES = (
    TrainerExample(
        "hugging_face_trainer",
        plain={
            "from penstock": "from transformers import Trainer\nfrom penstock",
            "PipelineTrainer(\n": "Trainer(\n",
            ", pipeline=pipeline": "",
        },
        state="trained/checkpoint-10",
        argument="trained/checkpoint-10",
        model="trained/final",
    ),
    LightningExample(
        "lightning_trainer",
        plain={
            "strategy=strategy, devices=2": "devices=1",
            'save_pretrained(strategy.pipeline, "trained", model=module.model)': (
                'module.model.save_pretrained("trained")'
            ),
        },
        state="lightning_logs/version_0/checkpoints/epoch=1-step=10.ckpt",
        argument="lightning_logs/version_0/checkpoints/epoch=1-step=10.ckpt",
        early={'"max_epochs": 4': '"max_epochs": 2'},
    ),
    Example(
        "fabric_loop",
        plain={
            "strategy=strategy, devices=2": "devices=1",
            'save_pretrained(strategy.pipeline, "trained", model=whole)': (
                'whole.save_pretrained("trained")'
            ),
        },
        state="state-2",
        argument="2",
    ),
    Example(
        "accelerator_loop",
        plain={
            "PipelineAccelerator(pipeline=pipeline, ": "Accelerator(",
            "from penstock": "from accelerate import Accelerator\nfrom penstock",
            'accelerator.save_model(model, "trained")': 'model.save_pretrained("trained")',
        },
        state="state-2",
        argument="2",
    ),
)
# Steps, and evaluations in between.
STEPS, EVALUATIONS = 20, 4


def write(folder: Path, name: str, size: int, changes: Mapping[str, str]) -> list[str]:
    """Write a script to a folder, and return the command for `size` processes."""
    folder.mkdir()
    code = SCRIPTS[name].code
    for ours, theirs in changes.items():
        assert ours in code
        code = code.replace(ours, theirs, 1)
    file = folder / "loop.py"
    file.write_text(code.replace("devices=2", f"devices={size}"))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return [sys.executable, *(start if size > 1 else []), str(file)]


def load_all(folder: Path) -> dict[str, Any]:
    files = folder.glob("*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_same_model(found: Path, expected: Path) -> None:
    saved, exact = map(load_all, (found, expected))
    assert exact
    assert saved.keys() == exact.keys()
    for name, value in exact.items():
        torch.testing.assert_close(saved[name], value, rtol=0.0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_over_processes_a_script_trains_what_the_library_does_in_one(
    example: Example, tmp_path: Path
) -> None:
    name = example.name
    assert len([line for line in SCRIPTS[name].code.splitlines() if line.strip()]) <= 30
    folders = {what: tmp_path / str(what) for what in (1, 2, 4, "early", "resumed")}
    values: dict[object, list[float]] = {}
    for what, size, changes in (
        (1, 1, example.plain),
        (2, 2, {}),
        (4, 4, {}),
        ("early", 2, example.early),
        ("resumed", 4, {}),
    ):
        folder = folders[what]
        if what == "early" and not example.early:
            # All states are kept.
            folders["early"] = folders[2]
            continue
        command = write(folder, name, size, changes)
        if what == "resumed":
            shutil.copytree(folders["early"] / example.state, folder / example.state)
            command.append(example.argument)
        (output,) = run_all([command], folder)
        if what != "early":
            values[what] = example.values_of(Run(folder, output))
    expected = values[1]
    assert len(expected) == STEPS + EVALUATIONS
    for what in (2, 4):
        assert values[what] == pytest.approx(expected, rel=0, abs=1e-5)
    # The Trainer keeps what was logged before.
    resumed = values["resumed"][-len(expected) // 2 :]
    assert resumed == pytest.approx(expected[len(expected) // 2 :], rel=0, abs=1e-5)
    for what in (2, 4, "resumed"):
        assert_same_model(folders[what] / example.model, folders[1] / example.model)
