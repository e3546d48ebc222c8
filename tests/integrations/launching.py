"""Programs of tests, as many processes as they ask for, started as users start them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "program", "run_all"]

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240.0


def program(module: str, *words: str, processes: int = 1) -> list[str]:
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        start += [str(processes)]
    return [*start, "-m", module, *words]


def run_all(*commands: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    started = [
        subprocess.Popen(
            one,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        for one in commands
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_SECONDS)[1] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    for process, text in zip(started, errors, strict=True):
        assert process.returncode == 0, text[-4000:]
