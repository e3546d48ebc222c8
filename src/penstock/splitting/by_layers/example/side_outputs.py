"""Values that a unit hands out in another way than by returning them.

A hook inside of a layer, or a list that layers add to, makes such a value; on a stage that does
not have the layer it would be missing, and what is computed from such values would be wrong.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.errors import ModelError
from penstock.torch_private import tree_leaves

__all__ = ["SideOutputWatch", "SideOutputs", "tensors_in", "written_by"]


class SideOutputs:
    """The tensors that were made inside of units and not returned, and what came from them.

    Only what depends on a parameter or on numbers that the unit was given counts: a table that
    the first layer makes for all of them is made again wherever it is missing. `bonds` has the
    pairs of units of which the second has used such a tensor of the first.
    """

    def __init__(self) -> None:
        self.bonds: set[tuple[str, str]] = set()
        self._makers: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()
        self._given: MutableMapping[torch.Tensor, None] = WeakTensorKeyDictionary()

    def enter(self, given: Any) -> None:
        """A unit is called with this."""
        self._given.clear()
        for tensor in tensors_in(given):
            if tensor.is_floating_point():
                self._given[tensor] = None

    def note_inside(self, path: str, func: Any, given: tuple[Any, ...], result: Any) -> None:
        """Something was computed inside of a unit."""
        used = list(tensors_in(given))
        makers = {self._makers[tensor] for tensor in used if tensor in self._makers}
        self.bonds.update((maker, path) for maker in makers if maker != path)
        if makers or any(isinstance(t, nn.Parameter) or t in self._given for t in used):
            for tensor in (*written_by(func, given), *tensors_in(result)):
                self._makers[tensor] = path

    def note_outside(self, given: Any, result: Any) -> None:
        """Something was computed between units."""
        for tensor in tensors_in(given):
            if tensor in self._makers:
                for made in tensors_in(result):
                    self._makers[made] = self._makers[tensor]
                return

    def forgive(self, output: Any) -> None:
        """A unit returns this."""
        for tensor in tensors_in(output):
            self._makers.pop(tensor, None)

    def refuse(self, tree: Any, who: str) -> None:
        """Stop, if anything in this tree came from inside of a unit by the back door."""
        for tensor in tensors_in(tree):
            if tensor in self._makers:
                raise ModelError(
                    f"{who} a value that was made in {self._makers[tensor]!r}, but not returned "
                    "by it; other stages know only what a module returns, so let it return that "
                    "too (and leave out options that collect values from inside of layers, such "
                    "as output_router_logits)"
                )


class SideOutputWatch(TorchFunctionMode):
    """Notes everything that is computed; `inside` gives the path of the unit that runs, if any."""

    def __init__(self, leaks: SideOutputs, inside: Callable[[], str | None]) -> None:
        super().__init__()
        self._leaks, self._inside = leaks, inside

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do what is asked, and note it."""
        result = func(*args, **(kwargs or {}))
        path = self._inside()
        if path is None:
            self._leaks.note_outside((args, kwargs), result)
        else:
            self._leaks.note_inside(path, func, (*args, kwargs), result)
        return result


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def written_by(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a function writes to, by its name."""
    name = getattr(func, "__name__", "")
    is_written = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    is_written |= name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return [args[0]] if is_written and args and isinstance(args[0], torch.Tensor) else []
