"""The Trainer trains in pipelines as it does in one process: losses, metrics and weights."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import run_forked
from tests.integrations.launching import program, run_all

RUN = "tests.integrations.hugging_face.run"
# How fast a run was, and the mean over the steps since it was resumed.
NOT_COMPARED = ("runtime", "per_second", "train_loss")


def command(what: str, folder: Path, *settings: str, processes: int = 1) -> list[str]:
    return program(RUN, what, str(folder), *settings, processes=processes)


def logs_of(folder: Path) -> list[dict[str, Any]]:
    entries = json.loads((folder / "logs.json").read_text())
    return [
        {k: v for k, v in entry.items() if not any(word in k for word in NOT_COMPARED)}
        for entry in entries
    ]


def weights_of(folder: Path, pattern: str = "model*.safetensors") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted((folder / "final").glob(pattern)):
        found |= load_file(file)
    return found


def assert_same(
    found: Path, expected: Path, *, limit: float = 1e-5, pattern: str = "model*.safetensors"
) -> None:
    for mine, other in zip(logs_of(found), logs_of(expected), strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            scale = 100 if name == "grad_norm" else 1
            assert abs(mine[name] - value) <= scale * limit, (name, mine, other)
    weights, others = weights_of(found, pattern), weights_of(expected, pattern)
    assert others
    assert weights.keys() == others.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(weights[name], tensor, rtol=limit, atol=limit, msg=name)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    run_all(
        command("trainer", tmp_path / "one", "steps=9"),
        command("ZBV", tmp_path / "two", "steps=9", processes=2),
    )
    assert_same(tmp_path / "two", tmp_path / "one")


# The library fills the last batch of replicas up with other rows, which changes its loss: 18 rows
# fill all of them.
CASES: dict[str, tuple[str, int, Sequence[str], Sequence[str]]] = {
    "1F1B": ("1F1B", 2, (), ()),
    "tied": ("ZBV", 2, ("tied=yes",), ("tied=yes",)),
    "4 ranks": ("Interleaved1F1B", 4, (), ()),
    "replicas": ("1F1B", 4, ("ranks=2", "batch=2", "eval_batch=3", "held=18"), ("held=18",)),
    "replicas without metrics": (
        "ZBV",
        4,
        ("ranks=2", "batch=2", "eval_batch=3", "held=18", "metrics=no"),
        ("held=18", "metrics=no"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_pipelines_and_replicas_train_as_one_process(tmp_path: Path, name: str) -> None:
    schedule, processes, settings, others = CASES[name]
    run_all(
        command("trainer", tmp_path / "one", *others),
        command(schedule, tmp_path / "many", *settings, processes=processes),
    )
    assert_same(tmp_path / "many", tmp_path / "one")


@pytest.mark.slow
def test_the_best_model_of_all_evaluations_is_kept(tmp_path: Path) -> None:
    # Data are random, so that the evaluation is best long before the end.
    run_all(
        command("trainer", tmp_path / "one", "best=yes"),
        command("ZBV", tmp_path / "two", "best=yes", processes=2),
    )
    held = [entry["eval_loss"] for entry in logs_of(tmp_path / "one") if "eval_loss" in entry]
    assert min(held) == held[0]
    assert_same(tmp_path / "two", tmp_path / "one")
    assert [path.name for path in (tmp_path / "two").glob("checkpoint-*")] == ["checkpoint-7"]


@pytest.mark.slow
def test_a_run_resumes_in_another_layout(tmp_path: Path) -> None:
    one, two, four = tmp_path / "one", tmp_path / "two", tmp_path / "four"
    run_all(command("trainer", one), command("ZBV", two, "stop=11", processes=2))
    checkpoint = two / "checkpoint-8"
    run_all(command("Interleaved1F1B", four, f"resume={checkpoint}", processes=4))
    assert_same(four, one)


@pytest.mark.slow
def test_a_pipeline_resumes_from_what_the_library_has_saved(tmp_path: Path) -> None:
    # Its optimizer was left out, silently, and one of the user's own could not be saved.
    one, two = tmp_path / "one", tmp_path / "two"
    run_all(command("trainer", one, "optimizer=own"))
    settings = ("optimizer=own", f"resume={one / 'checkpoint-8'}")
    run_all(command("ZBV", two, *settings, processes=2))
    assert_same(two, one)


@pytest.mark.slow
def test_random_numbers_of_data_are_resumed_in_another_layout(tmp_path: Path) -> None:
    # Ranks without a file of their own drew other numbers, and so had other data. The library
    # itself draws other numbers after a resume than without it.
    one, two, four = tmp_path / "one", tmp_path / "two", tmp_path / "four"
    run_all(
        command("trainer", one, "draws=yes", "stop=8"),
        command("ZBV", two, "draws=yes", "stop=8", processes=2),
    )
    again = tmp_path / "again"
    run_all(
        command("trainer", again, "draws=yes", f"resume={one / 'checkpoint-8'}"),
        command("1F1B", four, "draws=yes", f"resume={two / 'checkpoint-8'}", processes=4),
    )
    assert_same(four, again)


def test_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.integrations.hugging_face.run import *\n"
        "from penstock.integrations.hugging_face import PipelineTrainer\n"
        "def tell(settings, **given):\n"
        "    args = TrainingArguments(sys.argv[1], use_cpu=True, report_to='none', **settings)\n"
        "    try:\n        PipelineTrainer(make_model(tied=False), args, **given)\n"
        "    except ValueError as error:\n        print(error)\n"
        "tell({'label_smoothing_factor': 0.1})\n"
        "tell({'bf16_full_eval': True})\n"
        "tell({'optim': 'lomo'})\n"
        "tell({}, compute_loss_func=len)\n"
        "class Prefers(PipelineTrainer):\n"
        "    def compute_loss(self, model, inputs, **_):\n        return model(**inputs).loss\n"
        "PipelineTrainer = Prefers\n"
        "tell({})\n"
    )
    found = run_forked(code, str(tmp_path), warning="ignore")
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "label_smoothing_factor must be 0 in a PipelineTrainer (got 0.1); leave it out",
        "bf16_full_eval must be False in a PipelineTrainer (got True); leave it out",
        "optim must be an optimizer that steps after the backward in a PipelineTrainer (got "
        "'lomo'); use another one",
        "a PipelineTrainer takes the loss that the model computes, and one device per process; "
        "leave out compute_loss_func and fsdp, and start one process per device",
        "a PipelineTrainer does not call compute_loss; let the model compute the loss",
    ]


@pytest.mark.slow
def test_adapters_are_trained_and_saved_alone(tmp_path: Path) -> None:
    run_all(
        command("trainer", tmp_path / "one", "lora=yes"),
        command("1F1B", tmp_path / "two", "lora=yes", processes=2),
    )
    assert_same(tmp_path / "two", tmp_path / "one", pattern="adapter*.safetensors")


@pytest.mark.slow
def test_bf16_is_on_in_the_stages(tmp_path: Path) -> None:
    # Steps outside of the accelerator's autocast once ran in float32, silently.
    run_all(
        command("trainer", tmp_path / "one", "bf16=yes", "steps=6"),
        command("1F1B", tmp_path / "two", "bf16=yes", "steps=6", processes=2),
        command("1F1B", tmp_path / "float32", "steps=6", "ranks=2"),
    )
    found, expected, exact = (
        [entry["loss"] for entry in logs_of(tmp_path / name) if "loss" in entry][:2]
        for name in ("two", "one", "float32")
    )
    # Later ones differ by how bf16 was rounded on the way as much as by float32.
    near = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    apart = max(abs(a - b) for a, b in zip(exact, expected, strict=True))
    assert near < apart / 2


INIT_PROGRAM = """
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from penstock.integrations.hugging_face import PipelineConfig, PipelineTrainer


def make_model():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_attention_heads=2, **sizes))


rows = [{"input_ids": row, "labels": row} for row in torch.arange(32).view(4, 8) % 16]
logs = {"report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
trainer = PipelineTrainer(
    model_init=make_model,
    args=TrainingArguments(sys.argv[1], use_cpu=True, max_steps=2, learning_rate=1e-2, **logs),
    train_dataset=rows,
    pipeline=PipelineConfig("1F1B", microbatches=2, ranks=2),
)
losses = []
for _ in range(2):
    trainer.train()
    losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
assert len(losses[0]) == 2
assert losses[0] == losses[1], losses
"""


@pytest.mark.slow
def test_every_training_begins_with_a_new_model_where_there_is_a_model_init(
    tmp_path: Path,
) -> None:
    # The pipeline of the first one was kept, so that the second trained it further.
    run_all([sys.executable, "-c", INIT_PROGRAM, str(tmp_path)])
