"""Runs a program on Penstock that was written for torch: `python -m penstock.dropin script.py`.

    python -m penstock.dropin train.py --steps 10
    python -m penstock.dropin -m my.trainer --steps 10
    torchrun --nproc-per-node 4 -m penstock.dropin train.py
    python -m penstock.dropin -m torch.distributed.run --nproc-per-node 4 train.py

Python processes that the program starts find `startup` on their path, and do the same.
"""

import os
import runpy
import sys
from pathlib import Path

from penstock.dropin.installing import install

_USAGE = "usage: python -m penstock.dropin [-m module | script.py] [arguments]"


def _serve_child_processes() -> None:
    """Let processes that are started from here do the same."""
    startup = str(Path(__file__).parent / "startup")
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if startup not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([startup, *filter(None, known)])


def main() -> None:
    """Run what the command line names, as Python itself would."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        sys.exit(_USAGE)
    install()
    _serve_child_processes()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.exists():
        sys.exit(f"{script} does not exist; {_USAGE}")
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
