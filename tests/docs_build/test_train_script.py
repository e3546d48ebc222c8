"""The training script of the how-to, started with the commands that the page gives."""

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


def script_of_the_page() -> str:
    (script,) = re.findall(r"^```python\n(# train\.py\n.*?)^```$", PAGE.read_text(), re.M | re.S)
    return str(script)


def losses_of(command: list[str], folder: Path) -> list[float]:
    """Return the losses that a command prints; nothing it started is left behind."""
    folder.mkdir()
    (folder / "train.py").write_text(script_of_the_page())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, *command, "train.py"],
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
    assert (folder / "trained" / "model.safetensors").exists()
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.slow
def test_script_trains_alike_alone_and_on_two_ranks(tmp_path: Path) -> None:
    alone = losses_of([], tmp_path / "alone")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launched = losses_of(launch, tmp_path / "launched")
    assert len(alone) == 10
    assert alone[-1] < alone[0]
    assert launched == pytest.approx(alone, abs=2e-4)
