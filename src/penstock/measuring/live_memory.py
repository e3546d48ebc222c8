"""Which memory is alive: every tensor that is made meanwhile, until its storage is let go of."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveMemory", "storages_of"]


class LiveMemory(TorchDispatchMode):
    """Holds a weak reference to every storage that an operation makes inside.

    Only what still has an owner counts as alive; nothing is collected for it, so that memory
    which waits for the garbage collector counts too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        # A weak reference keeps the address of a storage from being used again.
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak: int | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's form
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view, and what is written in place, is made of what was given.
        given = storages_of(tree_leaves((args, kwargs)))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and not storages_of([value]) <= given:
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # upstream
                self._made.setdefault(storage._cdata, (reference, storage.nbytes()))
        if self._peak is not None:
            self._peak = max(self._peak, self.bytes())
        return result

    @contextmanager
    def watching(self) -> Iterator[Callable[[], int]]:
        """Make the storages of what runs inside count, and tell the most bytes alive meanwhile.

        That is looked up after every operation, which takes time.
        """
        self._peak = self.bytes()
        try:
            with self:
                yield lambda: self._peak or 0
        finally:
            self._peak = None

    def storages(self) -> set[int]:
        """The storages that are alive now, by address."""
        dead = [key for key, (ref, _) in self._made.items() if ref.expired()]  # type: ignore[no-untyped-call]  # upstream
        for key in dead:
            del self._made[key]
        return set(self._made)

    def bytes(self) -> int:
        """The bytes of the storages that are alive now."""
        alive = self.storages()
        return sum(size for key, (_, size) in self._made.items() if key in alive)


def storages_of(values: Iterable[object]) -> set[int]:
    """The storages of those values that are tensors, by address."""
    return {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}
