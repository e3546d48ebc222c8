"""The script of docs/running.md, under torchrun, in real processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "running.md"
LIMIT_SECONDS = 240


@pytest.mark.slow
def test_script_of_the_page_trains(tmp_path: Path) -> None:
    script = re.search(r"```py\n(# train\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*command, "--nproc-per-node", "2", "train.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=LIMIT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"loss 0\.\d+\n", result.stdout)
