"""The demo as a user starts it: two of these tests start the real thing, in processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from penstock.cli import main
from penstock.cli.progress import show_steps

pytest.importorskip("torch")

from penstock.examples.language import Step, plan_lesson

LIMIT_SECONDS = 240


def start_demo(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "demo", "--output", str(output), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
    )


def test_demo_trains_exactly_and_leaves_its_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = start_demo(tmp_path, "--steps", "3")
    assert (result.returncode, result.stderr) == (0, "")
    difference = re.search(r"largest\s+difference in 3 steps: (\S+)", result.stdout)
    assert difference is not None
    assert float(difference[1]) < 1e-5
    assert "pipeline step 3/3: loss" in result.stdout
    assert "unsplit step 3/3: loss" in result.stdout
    assert result.stdout.count("rank 1  ") == 4
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "comparison.png",
        "training.png",
        "zb-h2.csv",
    ]


def test_demo_says_what_would_work_for_a_wrong_wish(tmp_path: Path) -> None:
    wishes = (
        (("--schedule", "ZBX"), "did you mean ZBV?"),
        (("--schedule", "DualPipe", "-r", "3"), "even"),
    )
    for arguments, message in wishes:
        result = CliRunner().invoke(main, ["demo", "--output", str(tmp_path), *arguments])
        assert result.exit_code == 2
        assert message in result.stderr


def test_log_gets_a_line_now_and_then() -> None:
    console = Console(width=80, force_terminal=False)
    lesson = plan_lesson("1F1B", ranks=2, steps=12, device="cpu")
    with console.capture() as captured, show_steps(console, "pipeline", lesson) as display:
        for number in range(1, 13):
            display.show(Step(number, loss=4 / number, seconds=0.5))
    assert captured.get().splitlines() == [
        f"pipeline step {number}/12: loss {4 / number:.4f}, 4,096 letters/s"
        for number in (1, 2, 4, 6, 8, 10, 12)
    ]
    assert [step.number for step in display.steps] == list(range(1, 13))


def test_terminal_gets_a_bar() -> None:
    console = Console(width=100, force_terminal=True, color_system=None)
    lesson = plan_lesson("1F1B", ranks=2, steps=2, device="cpu")
    with console.capture() as captured, show_steps(console, "pipeline", lesson) as display:
        for number in (1, 2):
            display.show(Step(number, loss=2.5, seconds=0.5))
    assert "2/2 loss 2.5000, 4,096 letters/s" in captured.get()


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
from penstock.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("arguments", "code"), [(("demo", "--output", "{}"), 0), (("verify", "1F1B"), 2)]
)
def test_without_torch_the_way_to_get_it_is_told(
    tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    given = [argument.format(tmp_path) for argument in arguments]
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *given], capture_output=True, text=True, check=False
    )
    assert result.returncode == code
    assert (
        "running needs torch; run pip install 'penstock[torch]'" in result.stdout + result.stderr
    )
