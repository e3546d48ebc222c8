"""Side outputs: values that come out of a unit in another way than by being returned.

Examples are tensors that a hook inside of a layer keeps, or a list that layers append to. A stage
that does not have the layer would miss them, and compute something else.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.errors import ModelError
from penstock.splitting.by_layers.hooks.inner_values import version_of
from penstock.torch_private import tree_leaves

__all__ = ["SideOutputMode", "SideOutputs", "tensors_in", "written_by"]


class SideOutputs:
    """The tensors that were made inside of units but not returned, and what depends on them.

    Only tensors that depend on a parameter or on an argument of the unit count. Others, like a
    table that the first layer makes for all layers, are computed again on other stages.
    `inner_uses` has the pairs of units of which the second has used such a tensor of the first.
    """

    def __init__(self) -> None:
        self.inner_uses: set[tuple[str, str]] = set()
        self._makers: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()
        # The arguments of the unit that runs, with their versions when it began.
        self._given: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()

    def enter(self, given: Any) -> None:
        """Begin a call of a unit with these arguments."""
        self._given.clear()
        for tensor in tensors_in(given):
            if tensor.is_floating_point():
                self._given[tensor] = version_of(tensor)

    def record_inside(self, path: str, func: Any, given: tuple[Any, ...], result: Any) -> None:
        """Record a computation inside of a unit."""
        used = list(tensors_in(given))
        makers = {self._makers[tensor] for tensor in used if tensor in self._makers}
        self.inner_uses.update((maker, path) for maker in makers if maker != path)
        if makers or any(isinstance(t, nn.Parameter) or t in self._given for t in used):
            # A function with nothing to do, such as `.to` or a dropout of 0, returns what it got.
            known = {id(tensor) for tensor in used if not self._is_written(tensor)}
            made = (tensor for tensor in tensors_in(result) if id(tensor) not in known)
            for tensor in (*written_by(func, given), *made):
                self._makers[tensor] = path

    def _is_written(self, tensor: torch.Tensor) -> bool:
        return self._given.get(tensor, version_of(tensor)) != version_of(tensor)

    def record_outside(self, given: Any, result: Any) -> None:
        """Record a computation between units."""
        for tensor in tensors_in(given):
            if tensor in self._makers:
                for made in tensors_in(result):
                    self._makers[made] = self._makers[tensor]
                return

    def allow(self, output: Any) -> None:
        """Allow the tensors that a unit returns."""
        for tensor in tensors_in(output):
            self._makers.pop(tensor, None)

    def refuse(self, tree: Any, who: str) -> None:
        """Raise if anything in this tree is a side output of a unit."""
        for tensor in tensors_in(tree):
            if tensor in self._makers:
                raise ModelError(
                    f"{who} a value that was made in {self._makers[tensor]!r}, but not returned "
                    "by it; return it too, because other stages get only what a module returns "
                    "(and leave out options that collect values from inside of layers, such as "
                    "output_router_logits)"
                )


class SideOutputMode(TorchFunctionMode):
    """Records all that is computed; `inside` returns the path of the running unit, or None."""

    def __init__(self, side_outputs: SideOutputs, inside: Callable[[], str | None]) -> None:
        super().__init__()
        self._side_outputs, self._inside = side_outputs, inside

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function, and record it."""
        result = func(*args, **(kwargs or {}))
        path = self._inside()
        if path is None:
            self._side_outputs.record_outside((args, kwargs), result)
        else:
            self._side_outputs.record_inside(path, func, (*args, kwargs), result)
        return result


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of a tree."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def written_by(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors that a function writes to, going by its name."""
    name = getattr(func, "__name__", "")
    is_written = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    is_written |= name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return [args[0]] if is_written and args and isinstance(args[0], torch.Tensor) else []
