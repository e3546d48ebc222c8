"""Programs of tests, each in a process that is forked from one that has imported what they need.

Starting Python with torch takes seconds, a fork milliseconds. A program that has to show what it
imports by itself, or how Python starts it, needs a process of its own: `subprocess.run`.
"""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from types import ModuleType

from tests.processes import start_server

__all__ = ["run_forked"]


def run_forked(
    code: str,
    *arguments: str,
    cwd: Path | None = None,
    warning: str = "default",
    environment: Mapping[str, str] | None = None,
    seconds: float = 300.0,
) -> CompletedProcess[str]:
    """Run a program as `python -c` would, and return how it ended and what it wrote.

    Its first filter of warnings is `warning`; `environment` is added to that of this process.
    """
    start_server()
    with TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = get_context("forkserver").Process(
            target=_run,
            args=(
                code,
                arguments,
                (output, errors),
                cwd or Path.cwd(),
                warning,
                {**os.environ, **(environment or {})},
            ),
        )
        process.start()
        process.join(seconds)
        is_late = process.is_alive()
        if is_late:
            process.kill()
            process.join()
        written = [file.read_text(encoding="utf-8") for file in (output, errors)]
        assert not is_late, f"the program did not end within {seconds} s; it wrote {written}"
        assert process.exitcode is not None
        return CompletedProcess([code, *arguments], process.exitcode, *written)


def _run(
    code: str,
    arguments: Sequence[str],
    files: tuple[Path, Path],
    cwd: Path,
    warning: str,
    environment: Mapping[str, str],
) -> None:
    for number, file in enumerate(files, 1):
        with file.open("w", encoding="utf-8") as opened:
            os.dup2(opened.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    warnings.simplefilter(warning)  # type: ignore[arg-type]  # one of the filters' names
    sys.argv = ["-c", *arguments]
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), program.__dict__)
