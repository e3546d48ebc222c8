"""The scripts of `examples/`, run with the very commands that they name."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs_build.scripts import ORDER, examples_page
from tests.examples.commands import ROOT, SCRIPTS, command_of, losses_of, run_all
from tests.forked import run_forked

torch = pytest.importorskip("torch")
nn = torch.nn
load_file = pytest.importorskip("safetensors.torch").load_file

ALONE = [name for name in ORDER if SCRIPTS[name].command.startswith("python ")]
# Those that import transformers or search for seconds run in `make test-all`.
LONG = {"hugging_face", "lora", "plan_a_cluster"}
SHORT = [name for name in ALONE if name not in LONG]


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
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("hugging_face", "trained/model.safetensors"),
        ("lora", "adapters/adapter_model.safetensors"),
    ],
)
def test_two_ranks_save_the_model_that_one_process_trains(
    name: str, file: str, tmp_path: Path
) -> None:
    script = SCRIPTS[name]
    folders = [tmp_path / "alone", tmp_path / "launched"]
    for folder in folders:
        folder.mkdir()
    run_all([command_of(script)], folders[0])
    launched = replace(script, command=f"torchrun --nproc-per-node 2 examples/{script.name}.py")
    run_all([command_of(launched)], folders[1])
    alone, saved = (load_file(folder / file) for folder in folders)
    assert set(saved) == set(alone) != set()
    for weight, value in alone.items():
        torch.testing.assert_close(saved[weight], value, rtol=0.0, atol=1e-5)


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
    saved = torch.load(tmp_path / "trained.pt")
    expected = trained_on_both_batches().state_dict()
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(saved[name], value, rtol=0.0, atol=1e-5)


def trained_on_both_batches() -> Any:
    """Train the model of the example in this process, on the rows of both pipelines."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    batches = []
    for number in range(2):
        torch.manual_seed(1 + number)
        batches.append((torch.randn(32, 16), torch.randn(32, 16)))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


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
    assert len(torch.load(tmp_path / "trained.pt")) == 2 * 4
