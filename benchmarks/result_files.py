"""The files in benchmarks/results: a title, how it was measured, and tables.

    # Planning

    - measured: 2026-11-15
    - command: `python benchmarks/planning.py`
    - machine: 2 cores of an Intel Xeon
    - versions: Python 3.11.7, torch 2.13.0+cpu
    - spread: the best of three runs; one run of torch

    ## Build, lower and check ZBV
    ...

Every program here writes its file with `write_result`. `docs_build/results.py` shows the files on
the pages of the documentation that link to them.
"""

import os
import platform
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
_LIBRARIES = ("numpy", "numba", "torch", "penstock")


def write_result(
    name: str, title: str, sections: Sequence[str], *, spread: str, device: str = ""
) -> str:
    """Write a result file, and return its text.

    `spread` says what the numbers are (the best of three runs, medians with quartiles), `device`
    what they were measured on beside the processor.
    """
    facts = {
        "measured": datetime.now(tz=UTC).date().isoformat(),
        "command": f"`{_command()}`",
        "machine": f"{device}, {_processor()}" if device else _processor(),
        "versions": _versions(),
        "spread": spread,
    }
    head = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    text = "\n\n".join([f"# {title}", head, *(section.strip() for section in sections)]) + "\n"
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
    return text


def _command() -> str:
    """Return how this program was started, without the folders of this machine."""
    given = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    words = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *given]
    threads = os.environ.get("OMP_NUM_THREADS")
    return " ".join([f"OMP_NUM_THREADS={threads}", *words] if threads else words)


def _processor() -> str:
    cores = len(os.sched_getaffinity(0))
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        facts = ""
    model = re.search(r"^model name\s*:\s*(.+)$", facts, re.MULTILINE)
    return f"{cores} cores of {model[1] if model else platform.machine()}"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for library in _LIBRARIES:
        # torch's metadata lack what was built: 2.13.0+cpu.
        module: Any = sys.modules.get(library)
        try:
            name = getattr(module, "__version__", None) or version(library)
        except PackageNotFoundError:
            continue
        # Penstock has none where it runs from its source.
        if name[:1].isdigit():
            found.append(f"{library} {name}")
    return ", ".join(found)
