"""Which memory is alive: every tensor that is made meanwhile, until its storage is freed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.torch_private import TorchDispatchMode, tree_leaves

__all__ = ["LiveMemory", "storages_of"]


class LiveMemory(TorchDispatchMode):
    """Weak references to every storage that an operation makes inside.

    A storage is alive while something owns it. Garbage is not collected, so that memory which
    waits for the garbage collector counts too.
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
        # A view, and the result of an in-place operation, use a storage that was given.
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
    def counting(self) -> Iterator[Callable[[], int]]:
        """Count the storages of what runs inside, and yield a function for the peak in bytes.

        The bytes are looked up after every operation, which takes time.
        """
        self._peak = self.bytes()
        try:
            with self:
                yield lambda: self._peak or 0
        finally:
            self._peak = None

    def storages(self) -> set[int]:
        """Return the storages that are alive now, by address."""
        dead = [key for key, (ref, _) in self._made.items() if ref.expired()]  # type: ignore[no-untyped-call]  # upstream
        for key in dead:
            del self._made[key]
        return set(self._made)

    def bytes(self) -> int:
        """Return the bytes of the storages that are alive now."""
        alive = self.storages()
        return sum(size for key, (_, size) in self._made.items() if key in alive)


def storages_of(values: Iterable[object]) -> set[int]:
    """Return the storages of those values that are tensors, by address."""
    return {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}
