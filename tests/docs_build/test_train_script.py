"""The training scripts of the how-to, started with the commands that the page gives."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "trainer.md"
LIMIT_SECONDS = 300.0


def script_of_the_page(name: str) -> str:
    scripts = re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", PAGE.read_text(), re.M | re.S)
    return str({file: script for script, file in scripts}[name])


def losses_of(command: list[str], name: str, folder: Path) -> list[float]:
    """Return the losses that a command prints; nothing it started is left behind."""
    folder.mkdir()
    (folder / name).write_text(script_of_the_page(name))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, *command, name],
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        cwd=folder,
        env=environment,
    ) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", output)]


# F1: the page had steps, of which one failed with the model of another, and no whole program.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["own.py", "train.py"])
def test_script_trains_alike_alone_and_on_two_ranks(name: str, tmp_path: Path) -> None:
    alone = losses_of([], name, tmp_path / "alone")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launched = losses_of(launch, name, tmp_path / "launched")
    if name == "train.py":
        assert (tmp_path / "launched" / "trained" / "model.safetensors").exists()
    assert len(alone) == 10
    assert alone[-1] < alone[0]
    assert launched == pytest.approx(alone, abs=2e-4)
