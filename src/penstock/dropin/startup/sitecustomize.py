"""Runs at the start of every Python process below `python -m penstock.dropin`; see `__main__`.

A `sitecustomize` that this one hides is run first.
"""

import importlib.util
import sys
from pathlib import Path

from penstock.dropin.installing import install

_HERE = str(Path(__file__).parent)


def _run_hidden() -> None:
    """Run the module of this name that Python would have found without us."""
    elsewhere = [place for place in sys.path if place != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_hidden()
install()
