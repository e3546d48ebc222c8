"""The commands that the scripts of `examples/` name, run unchanged."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from docs_build.scripts import Script, read_scripts

__all__ = ["ROOT", "SCRIPTS", "command_of", "losses_of", "run_all"]

ROOT = Path(__file__).parents[2]
SCRIPTS = {script.name: script for script in read_scripts(ROOT / "examples")}
LIMIT_SECONDS = 300.0


def command_of(script: Script, **places: str) -> list[str]:
    """Return what the script says to type, for this Python and this checkout."""
    text = script.command.replace("\\\n", " ")
    for name, value in places.items():
        text = text.replace(name, value)
    program, *rest = shlex.split(text)
    start = {"python": ["-W", "error"], "torchrun": ["-m", "torch.distributed.run"]}[program]
    arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in rest]
    return [sys.executable, *start, *arguments]


def run_all(commands: list[list[str]], folder: Path) -> list[str]:
    """Return what each command prints; all run at once, and none is left behind."""
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
