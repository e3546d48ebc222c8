"""The scripts of `examples/`, run with the very commands that they name."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs_build.scripts import ORDER, Script, examples_page, read_scripts
from tests.forked import run_forked

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

ROOT = Path(__file__).parents[2]
SCRIPTS = {script.name: script for script in read_scripts(ROOT / "examples")}
ALONE = [name for name in ORDER if SCRIPTS[name].command.startswith("python ")]
# Those that import transformers or search for seconds run in `make test-all`.
LONG = {"hugging_face", "lora", "plan_a_cluster"}
SHORT = [name for name in ALONE if name not in LONG]
LIMIT_SECONDS = 300.0


def command_of(script: Script, **places: str) -> list[str]:
    """What the script says to type, for this Python and this checkout."""
    text = script.command.replace("\\\n", " ")
    for name, value in places.items():
        text = text.replace(name, value)
    program, *rest = shlex.split(text)
    start = {"python": ["-W", "error"], "torchrun": ["-m", "torch.distributed.run"]}[program]
    arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in rest]
    return [sys.executable, *start, *arguments]


def run_all(commands: list[list[str]], folder: Path) -> list[str]:
    """What each command prints; all run at once, and none is left behind."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        answers = [process.communicate(timeout=LIMIT_SECONDS) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    for process, (_, errors) in zip(started, answers, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in answers]


def losses_of(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", output)]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def test_every_example_names_one_command_and_its_own_file() -> None:
    for script in SCRIPTS.values():
        assert script.command.endswith(f"examples/{script.name}.py")
        assert script.text != ""


def test_page_has_every_example_whole() -> None:
    page = examples_page(ROOT / "examples")
    for script in SCRIPTS.values():
        assert script.code in (ROOT / "examples" / f"{script.name}.py").read_text()
        assert f"\n{script.code}\n```" in page


def test_first_pipeline_is_twenty_lines() -> None:
    code = SCRIPTS["first_pipeline"].code.splitlines()
    assert len([line for line in code if line.strip()]) <= 20


# Runs a script as the main program.
RUN_SCRIPT = """
import sys
from runpy import run_path
run_path(sys.argv[1], run_name="__main__")
"""


def check_losses(name: str, output: str) -> None:
    losses = losses_of(output)
    expected = {"first_pipeline": 5, "hugging_face": 10, "lora": 10}.get(name, len(losses))
    assert len(losses) == expected
    assert losses == sorted(losses, reverse=True)


# In processes that have imported torch; `make test-all` starts the commands themselves.
@pytest.mark.parametrize("name", SHORT)
def test_short_example_runs(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / f"{name}.py"
    ended = run_forked(RUN_SCRIPT, str(script), cwd=tmp_path, warning="error")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout != ""
    check_losses(name, ended.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_example_in_one_process_runs(name: str, tmp_path: Path) -> None:
    (output,) = run_all([command_of(SCRIPTS[name])], tmp_path)
    check_losses(name, output)


# Each rank saved the model with its own half of it trained, over what the other had saved.
@pytest.mark.slow
def test_two_ranks_save_the_hugging_face_model_that_one_process_trains(tmp_path: Path) -> None:
    script = SCRIPTS["hugging_face"]
    folders = [tmp_path / "alone", tmp_path / "launched"]
    for folder in folders:
        folder.mkdir()
    run_all([command_of(script)], folders[0])
    launched = replace(script, command=f"torchrun --nproc-per-node 2 examples/{script.name}.py")
    run_all([command_of(launched)], folders[1])
    alone, saved = (load_file(folder / "trained" / "model.safetensors") for folder in folders)
    assert set(saved) == set(alone)
    for name, value in alone.items():
        torch.testing.assert_close(saved[name], value, rtol=0.0, atol=1e-5)


def history_of(folder: Path) -> list[dict[str, float]]:
    state = json.loads((folder / "trained" / "checkpoint-20" / "trainer_state.json").read_text())
    timed = ("runtime", "per_second")
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in timed)}
        for entry in state["log_history"]
    ]


@pytest.mark.slow
def test_trainer_over_two_ranks_logs_what_the_library_does_in_one_process(tmp_path: Path) -> None:
    script = SCRIPTS["hugging_face_trainer"]
    assert len([line for line in script.code.splitlines() if line.strip()]) <= 30
    plain = script.code.replace("PipelineTrainer(", "Trainer(").replace(", pipeline=pipeline", "")
    folders = [tmp_path / "alone", tmp_path / "launched"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "plain.py").write_text(f"from transformers import Trainer\n{plain}")
    run_all([[sys.executable, "plain.py"]], folders[0])
    run_all([command_of(script)], folders[1])
    alone, launched = map(history_of, folders)
    for found, expected in zip(launched, alone, strict=True):
        assert found == pytest.approx(expected, rel=0, abs=1e-5 if "loss" in found else 1e-4)
    whole, *shards = (
        sorted((folder / "trained" / "final").glob("*.safetensors")) for folder in folders
    )
    saved = {name: value for file in shards[0] for name, value in load_file(file).items()}
    expected_state = load_file(whole[0])
    assert saved.keys() == expected_state.keys()
    for name, value in expected_state.items():
        torch.testing.assert_close(saved[name], value, rtol=0.0, atol=1e-4)


# Each with the library alone, from the same script: what is put in the place of our names.
PLAIN: dict[str, dict[str, str]] = {
    "lightning_trainer": {
        "strategy=strategy, devices=2": "devices=1",
        'save_pretrained(strategy.pipeline, "trained", model=module.model)': (
            'module.model.save_pretrained("trained")'
        ),
    },
    "fabric_loop": {
        "strategy=strategy, devices=2": "devices=1",
        'save_pretrained(strategy.pipeline, "trained", model=whole)': (
            'whole.save_pretrained("trained")'
        ),
    },
    "accelerator_loop": {
        "PipelineAccelerator(pipeline=pipeline, ": "Accelerator(",
        "from penstock": "from accelerate import Accelerator\nfrom penstock",
        'accelerator.save_model(model, "trained")': 'model.save_pretrained("trained")',
    },
}


def saved_by(folder: Path) -> dict[str, Any]:
    files = sorted((folder / "trained").glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_loops_of_other_libraries_train_what_they_do_in_one_process(
    name: str, tmp_path: Path
) -> None:
    script = SCRIPTS[name]
    assert len([line for line in script.code.splitlines() if line.strip()]) <= 30
    plain = script.code
    for ours, theirs in PLAIN[name].items():
        assert ours in plain
        plain = plain.replace(ours, theirs, 1)
    folders = {size: tmp_path / str(size) for size in (1, 2, 4)}
    outputs: dict[int, str] = {}
    for size, folder in folders.items():
        folder.mkdir()
        file = folder / "loop.py"
        file.write_text(
            plain if size == 1 else script.code.replace("devices=2", f"devices={size}")
        )
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command = [sys.executable, *(start if size > 1 else []), str(file)]
        (outputs[size],) = run_all([command], folder)
    expected = saved_by(folders[1])
    for size in (2, 4):
        assert losses_of(outputs[size]) == pytest.approx(losses_of(outputs[1]), rel=0, abs=1e-5)
        found = saved_by(folders[size])
        assert found.keys() == expected.keys()
        for weight, value in expected.items():
            torch.testing.assert_close(found[weight], value, rtol=0.0, atol=1e-4)


@pytest.mark.slow
def test_example_of_experts_trains_on_four_processes(tmp_path: Path) -> None:
    script = SCRIPTS["mixture_of_experts"]
    assert len([line for line in script.code.splitlines() if line.strip()]) <= 60
    (output,) = run_all([command_of(script)], tmp_path)
    losses = losses_of(output)
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_example_of_fsdp_runs_on_four_processes(tmp_path: Path) -> None:
    (output,) = run_all([command_of(SCRIPTS["fsdp"])], tmp_path)
    lines = sorted(output.splitlines())
    assert [line.partition(":")[0] for line in lines] == ["pipeline 0", "pipeline 1"]


@pytest.mark.slow
def test_example_of_several_machines_runs_under_two_agents(tmp_path: Path) -> None:
    script = SCRIPTS["several_machines"]
    assert "HOST:29500" in script.command
    agent = command_of(script, **{"HOST:29500": f"localhost:{free_port()}"})
    outputs = run_all([agent, agent], tmp_path)
    (lines,) = [output.splitlines() for output in outputs if output]
    assert [line.partition(":")[0] for line in lines] == [
        f"step {step:2} on 4 ranks" for step in (5, 10, 15, 20)
    ]
    losses = losses_of("\n".join(lines))
    assert losses == sorted(losses, reverse=True)
