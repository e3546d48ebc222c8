"""Stand-ins for tensors whose values are on another stage.

A stage runs the model's own forward. What layers of other stages return and this stage does not
need is a stand-in. It has a shape, a dtype and a device, so that code that reads these runs as
usual, and whatever is computed from it is a stand-in again. Reading its values is an error.
"""

from typing import Any

import torch

from penstock.errors import ModelError
from penstock.torch_private import make_wrapper_subclass, tree_leaves, tree_map

__all__ = ["ADVICE", "Absent", "StandIn", "stand_in"]


class StandIn(torch.Tensor):
    """A tensor without values; `sources` names the modules that have returned them."""

    meta: torch.Tensor
    sources: frozenset[str]

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, device: torch.device, sources: frozenset[str]
    ) -> "StandIn":
        """Make a stand-in with the shape of a tensor on the meta device, but on `device`."""
        made: StandIn = make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made.meta, made.sources = meta, sources
        return made

    def __repr__(self) -> str:  # type: ignore[override]  # a keyword of Tensor's own use
        return (
            f"StandIn({tuple(self.shape)}, {self.dtype}, from {', '.join(sorted(self.sources))})"
        )

    def tolist(self) -> Any:
        """Raise, because a stand-in has no values."""
        raise _missing("tolist", self.sources)

    def numpy(self, *, force: bool = False) -> Any:
        """Raise, because a stand-in has no values."""
        del force
        raise _missing("numpy", self.sources)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # typed as a plain method upstream
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation on the meta device."""
        given = tree_leaves((args, kwargs or {}))
        known = [leaf for leaf in given if isinstance(leaf, StandIn)]
        sources = frozenset().union(*(leaf.sources for leaf in known))
        _refuse_writing(func, args, sources)
        owner = {id(leaf.meta): leaf for leaf in known}
        device = next((leaf for leaf in given if isinstance(leaf, torch.device)), known[0].device)

        def wrap(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            same = owner.get(id(result))
            return StandIn(result, device, sources) if same is None else same

        try:
            result = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs or {}))
        except (NotImplementedError, RuntimeError) as error:
            raise _missing(str(func), sources) from error
        return tree_map(wrap, result)


class Absent:
    """An object that only another stage has; it can be passed on but not used."""

    def __init__(self, kind: str, source: str) -> None:
        self._kind, self._source = kind, source

    def __repr__(self) -> str:
        return f"Absent({self._kind}, from {self._source})"

    def _refuse(self, *_: Any) -> Any:
        raise ModelError(
            f"a {self._kind} that {self._source!r} got or returned is on another stage; do not "
            "use it in a hook"
        )

    __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


ADVICE = "split with example=, an example of such a call, so that each stage is sent what it needs"


def stand_in(shape: Any, dtype: torch.dtype, device: torch.device, source: str) -> StandIn:
    """Return a stand-in for what a module on another stage returned."""
    return StandIn(torch.empty(shape, dtype=dtype, device="meta"), device, frozenset([source]))


def _as_meta(value: Any) -> Any:
    match value:
        case StandIn():
            return value.meta
        case torch.Tensor():
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        case torch.device():
            return torch.device("meta")
        case _:
            return value


def _refuse_writing(func: Any, args: tuple[Any, ...], sources: frozenset[str]) -> None:
    """Raise if a real tensor is written to, because it would silently keep its old values."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(value, torch.Tensor) and not isinstance(value, StandIn):
            raise ModelError(
                f"{func} writes what {_list(sources)} returned, which another stage has; {ADVICE}"
                ", or, if there was one, write to a new tensor there or split the model by tracing"
            )


def _missing(who: str, sources: frozenset[str]) -> ModelError:
    return ModelError(
        f"{who} needs the values of what {_list(sources)} returned, which another stage has; "
        f"{ADVICE}"
    )


def _list(sources: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(sources)))
