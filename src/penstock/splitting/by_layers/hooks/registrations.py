"""Hooks that the model's code registers while a stage runs it.

Every stage runs the same code and registers its own hooks. If several stages are in one process,
they must not call each other's.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import ModelError
from penstock.splitting.by_layers.hooks.hooks import Hook, HookTables, code_of, is_foreign, name_of

__all__ = ["Registrations", "next_number"]

# The attribute by which `transformers` remembers that it has registered hooks on all modules.
_INSTALLED = "_output_capturing_hooks_installed"


def next_number() -> int:
    """Return the number that the next hook of any module will get."""
    return RemovableHandle.next_id


class Registrations:
    """The hooks that runs of one model's stages have registered in this process."""

    def __init__(self, num_stages: int) -> None:
        self.local: set[int] = set()
        self._waiting = set(range(num_stages))

    def record(
        self, stage: int, start: int, tables: Iterable[HookTables], copies: Mapping[Any, nn.Module]
    ) -> None:
        """Record the hooks with numbers from `start`, which the run of a stage has registered."""
        for table in tables:
            for hooks in (table.before, table.after):
                new = [n for n, hook in hooks.items() if n >= start and is_foreign(hook)]
                for number in new:
                    self._refuse_second(hooks, number)
                self.local.update(new)
        self._waiting.discard(stage)
        if not self._waiting:
            # The model's own modules have all hooks by now.
            for original, copied in list(copies.items()):
                if vars(copied).get(_INSTALLED) and not vars(original).get(_INSTALLED):
                    vars(original)[_INSTALLED] = True

    def _refuse_second(self, hooks: Mapping[int, Hook], number: int) -> None:
        code = code_of(hooks[number])
        for other, hook in hooks.items():
            if other in self.local and code_of(hook) == code:
                name = name_of(hook)
                raise ModelError(
                    f"the model's forward registers the hook {name} in every run, but a stage may "
                    "end before it is removed; remove it in a finally clause, or register it once"
                )
