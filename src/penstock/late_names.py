"""Names of a package that are loaded when they are first used.

A package with many names costs whoever needs one of them no more than that one:

    __getattr__, __dir__ = late_names(__name__, {"plan": "planning", "Plan": "plans"})
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules
from typing import Any

__all__ = ["late_names"]


def late_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`, given the module in it of each name."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        known = vars(modules[package])
        hidden = [name for name in known if name.startswith("__")]
        return sorted({*hidden, *known.get("__all__", ()), *homes})

    return load, names
