"""Lets `import torch.distributed.pipelining`, and its submodules, mean `penstock.dropin`.

A finder before all others answers for these names only, when they are first imported; so nothing
is loaded before a program needs it.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from penstock.errors import PenstockError

__all__ = ["THEIRS", "install", "uninstall"]

THEIRS = "torch.distributed.pipelining"
_OURS = "penstock.dropin"


class _Finder(MetaPathFinder, Loader):
    """Answers for torch's package and what lies in it, with our module in place of torch's."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if _is_theirs(name) else None

    def exec_module(self, module: ModuleType) -> None:
        """Put our module under the name, where the import system looks it up afterwards."""
        name = module.__name__
        sys.modules[name] = import_module(_OURS + name.removeprefix(THEIRS))


def _is_theirs(name: str) -> bool:
    return name == THEIRS or name.startswith(f"{THEIRS}.")


_FINDER = _Finder()


def install() -> None:
    """Replace `torch.distributed.pipelining` by ours, before anything in this process has it."""
    loaded = sys.modules.get(THEIRS)
    if loaded is not None and loaded.__name__ != _OURS:
        raise PenstockError(
            f"{THEIRS} was imported before install(), and code that has it would keep using "
            "torch's; call penstock.dropin.install() first, or run the program with "
            "python -m penstock.dropin"
        )
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Let `import torch.distributed.pipelining` give torch's own package again."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in filter(_is_theirs, list(sys.modules)):
        if sys.modules[name].__name__.startswith(_OURS):
            del sys.modules[name]
    parent = sys.modules.get(THEIRS.rpartition(".")[0])
    if parent is not None and getattr(vars(parent).get("pipelining"), "__name__", "") == _OURS:
        delattr(parent, "pipelining")
