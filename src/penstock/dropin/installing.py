"""Lets `import torch.distributed.pipelining`, and its submodules, mean `penstock.dropin`.

A finder stands in front of all others and answers for these names only, when they are first asked
for; so nothing is loaded before a program wants it.
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


class _Loader(Loader):
    """Gives our module in place of the one that was asked for."""

    def exec_module(self, module: ModuleType) -> None:
        """Put our module under the name; what the import system gives out is what stands there."""
        name = module.__name__
        sys.modules[name] = import_module(_OURS + name.removeprefix(THEIRS))


class _Finder(MetaPathFinder):
    """Answers for torch's package and what lies in it."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module comes from, if it is one of these."""
        is_theirs = name == THEIRS or name.startswith(f"{THEIRS}.")
        return ModuleSpec(name, _Loader()) if is_theirs else None


_FINDER = _Finder()


def install() -> None:
    """From now on, `torch.distributed.pipelining` in this process is ours.

    Call it before anything imports that package; what was imported already would stay torch's.
    """
    loaded = sys.modules.get(THEIRS)
    if loaded is not None and loaded.__name__ != _OURS:
        raise PenstockError(
            f"{THEIRS} was imported before install(), and code that has it would go on with "
            "torch's; call penstock.dropin.install() first, or run the program with "
            "python -m penstock.dropin"
        )
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """From now on, `import torch.distributed.pipelining` gives torch's own again."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in [name for name in sys.modules if name == THEIRS or name.startswith(f"{THEIRS}.")]:
        if sys.modules[name].__name__.startswith(_OURS):
            del sys.modules[name]
    parent = sys.modules.get(THEIRS.rpartition(".")[0])
    if parent is not None and getattr(vars(parent).get("pipelining"), "__name__", "") == _OURS:
        delattr(parent, "pipelining")
