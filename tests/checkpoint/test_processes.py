"""Checkpoints of real processes: sharded, copied and single, in every combination."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.checkpoint.manifest import SavedTensor
from penstock.checkpoint.manifest_reading import read_manifest
from penstock.checkpoint.storage.local import LocalStorage
from tests.checkpoint.jobs import (
    continue_in_processes,
    disagree_in_processes,
    save_in_processes,
    train_alone,
    train_plain,
    whole_state,
)
from tests.models import differences
from tests.processes import Processes

STEPS = 2


def expected_state() -> dict[str, torch.Tensor]:
    """Return the state of plain torch one step after the save."""
    return whole_state(train_plain(STEPS + 1).model.state_dict())


def continue_alone(folder: Path) -> dict[str, torch.Tensor]:
    training = train_alone("1F1B", 1, seed=5)
    restored = ps.Checkpoints(folder).load(training.pipeline, training.optimizer)
    assert restored == ps.checkpoint.Restored(STEPS, {"place": STEPS}, has_generator_states=False)
    training.step(STEPS)
    return whole_state(training.pipeline.state_dict())


PLAIN = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_state_dict, set_state_dict,
)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("gain", torch.rand(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.gain.sum()

model = Tied().double()
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.Adam([{"params": decayed}, {"params": others}], lr=3.0)

options = StateDictOptions(flatten_optimizer_state_dict=True)
model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
state = {"model": model_state, "optim": optimizer_state}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
set_state_dict(model, optimizer, model_state_dict=state["model"],
               optim_state_dict=state["optim"], options=options)

generator = torch.Generator().manual_seed(100 + int(sys.argv[2]))
tokens, target = torch.randint(7, (2, 16), generator=generator)
nn.functional.cross_entropy(model(tokens), target).backward()
optimizer.step()
torch.save(model.state_dict(), sys.argv[3])
assert "penstock" not in sys.modules
"""


def continue_plainly(folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Load a checkpoint in a process without Penstock, and train for one more step."""
    arguments = [str(folder / f"step-{STEPS:08}"), str(STEPS), str(scratch / "state.pt")]
    command = [sys.executable, "-c", PLAIN, *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    state: dict[str, torch.Tensor] = torch.load(scratch / "state.pt", weights_only=True)
    return state


def joined(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for state in states for name, value in state.items()}


def check_continuations(folder: Path, two_processes: Processes, scratch: Path) -> None:
    """Compare the next step with plain torch: in two processes, in one, and without Penstock."""
    states = two_processes.run(continue_in_processes, folder, "1F1B", 2, "alone", seconds=240)
    assert differences(joined(states), expected_state()) == {}
    assert differences(continue_alone(folder), expected_state()) == {}
    assert differences(continue_plainly(folder, scratch), expected_state()) == {}


@pytest.mark.parametrize(
    "copying", ["sharded", pytest.param("replicated", marks=pytest.mark.slow)]
)
def test_interleaved_copies_with_adam_continue_in_two_processes_in_one_and_in_plain_torch(
    copying: str, four_processes: Processes, two_processes: Processes, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    steps = four_processes.run(
        save_in_processes, folder, "Interleaved1F1B", 2, copying, STEPS, seconds=240
    )
    assert steps == [(STEPS,)] * 4
    check_continuations(folder, two_processes, tmp_path)


@pytest.mark.slow
def test_four_interleaved_ranks_of_sharded_stages_continue_in_every_other_layout(
    two_processes: Processes, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with Processes(8) as eight:
        steps = eight.run(
            save_in_processes, folder, "Interleaved1F1B", 4, "sharded", STEPS, seconds=600
        )
    assert steps == [(STEPS,)] * 8
    check_continuations(folder, two_processes, tmp_path)


@pytest.mark.parametrize(
    ("family", "ranks", "copying"),
    [("Interleaved1F1B", 2, "sharded"), ("ZBV", 2, "replicated"), ("Interleaved1F1B", 4, "alone")],
)
def test_step_saved_by_one_process_continues_in_four(
    family: str, ranks: int, copying: str, four_processes: Processes, tmp_path: Path
) -> None:
    training = train_alone("DualPipeV", 2)
    for step in range(STEPS):
        training.step(step)
    with ps.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(STEPS, training.pipeline, training.optimizer, data={"place": STEPS})
    states = four_processes.run(
        continue_in_processes, tmp_path, family, ranks, copying, seconds=240
    )
    assert differences(joined(states), expected_state()) == {}


def test_copies_and_ties_are_saved_once(four_processes: Processes, tmp_path: Path) -> None:
    training = train_alone("1F1B", 1)
    training.step(0)
    ps.Checkpoints(tmp_path / "one").save(1, training.pipeline, training.optimizer, wait=True)
    arguments = (tmp_path / "four", "ZBV", 2, "replicated", 1)
    four_processes.run(save_in_processes, *arguments, seconds=240)
    chunks = {
        folder: {
            key: len(tensor.chunks)
            for key, tensor in manifest_of(tmp_path / folder).items()
            if not key.startswith("random.")
        }
        for folder in ("one", "four")
    }
    assert chunks["one"] == chunks["four"]
    assert "model.head.weight" not in chunks["one"]


def manifest_of(folder: Path) -> dict[str, SavedTensor]:
    return read_manifest(LocalStorage(folder), 1).tensors


def test_ranks_that_differ_are_named_on_every_rank_and_change_nothing(
    two_processes: Processes, tmp_path: Path
) -> None:
    errors = two_processes.run(disagree_in_processes, tmp_path, seconds=240)
    expected = [
        "step 7 cannot be saved: step must be the same on all ranks (rank 0: 7, rank 1: 8); give "
        "all ranks the same",
        'step 7 cannot be saved: data must be the same on all ranks (rank 0: {"place": 0}, rank '
        '1: {"place": 1}); give all ranks the same',
        "rank 1: data must be what JSON can hold: Object of type set is not JSON serializable",
        "cannot load step 7: rank 1: norm.weight must have the shape [6] that was saved (got "
        "[2]); no other step",
    ]
    assert errors == [expected, expected]
