"""Memory for stages of a model on the meta device, and a check that all of it was filled.

All bits of new memory are one. In a floating-point number that is a NaN which no computation
returns. What still has these bits when the stage first runs was never filled.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import ModelError
from penstock.modules.untouched import same_random_numbers

__all__ = ["compute_buffers", "expect_filled", "give_memory", "unfilled_names"]

_NAMED = 6


def give_memory(stage: nn.Module, device: torch.device | str) -> frozenset[str]:
    """Allocate what is on the meta device, move the rest, and return the names of the former.

    A stage may also have real tensors, such as buffers that were computed when the model was
    built.
    """
    names = frozenset(name for name, tensor in _named(stage) if tensor.is_meta)
    stage._apply(partial(_move, device=torch.device(device)))  # type: ignore[no-untyped-call]  # untyped upstream
    return names


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:
        return tensor.to(device)
    made = torch.empty_like(tensor, device=device)
    _blank(made)
    return made


def _blank(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.dtype is torch.bool or not tensor.numel():
            tensor.fill_(True)
        else:
            _bits(tensor).fill_(-1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as integers; a complex number is two."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(width[tensor.element_size()])


def _named(stage: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(
        stage.named_parameters(remove_duplicate=False), stage.named_buffers(remove_duplicate=False)
    )


def compute_buffers(stage: nn.Module, names: frozenset[str]) -> None:
    """Compute buffers that are not in checkpoints by the model's own code, if it has some.

    Models of `transformers` do that in `_init_weights`. Other tensors that it fills are restored.
    """
    here: list[nn.Module] = []
    stage.apply(here.append)
    owners: dict[nn.Module, Any] = {}
    for module in here:
        if callable(getattr(type(module), "_init_weights", None)):
            for inner in module.modules():
                owners.setdefault(inner, module)
    wanted = {id(t): t for name, t in stage.named_buffers() if name in names}
    for module in here:
        missing = [
            buffer
            for name, buffer in module._buffers.items()
            if name in module._non_persistent_buffers_set
            and id(buffer) in wanted
            and buffer is not None
            and _is_blank(buffer)
        ]
        if missing and module in owners:
            _compute(module, owners[module]._init_weights, missing)


def _compute(
    module: nn.Module, initialize: Callable[[nn.Module], object], wanted: list[torch.Tensor]
) -> None:
    own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    others = [tensor for tensor in own if not any(tensor is one for one in wanted)]
    kept = [tensor.detach().clone() for tensor in others]
    with same_random_numbers(), torch.no_grad():
        initialize(module)
        for tensor, before in zip(others, kept, strict=True):
            _bits_or_self(tensor.data).copy_(_bits_or_self(before))


def _bits_or_self(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.bool else _bits(tensor)


@dataclass(slots=True, eq=False)
class _Check:
    """A check of a stage's tensors when it first runs, which then removes itself."""

    names: frozenset[str]
    versions: Mapping[str, int]
    handle: RemovableHandle | None = None

    def __call__(self, stage: nn.Module, _args: Any) -> None:
        """Raise if memory was never filled."""
        if torch.compiler.is_compiling():
            return
        if names := unfilled_names(stage, self.names, self.versions):
            raise ModelError(_describe(stage, names))
        if self.handle is not None:
            self.handle.remove()


def expect_filled(stage: nn.Module, names: frozenset[str]) -> None:
    """Make the first run of a stage raise unless the tensors of these names were filled."""
    versions = {name: tensor._version for name, tensor in _named(stage) if name in names}
    check = _Check(names, versions)
    check.handle = stage.register_forward_pre_hook(check, prepend=True)


def unfilled_names(
    stage: nn.Module, names: frozenset[str], versions: Mapping[str, int]
) -> list[str]:
    """Return the names of a stage's tensors that were never filled, or only in part.

    Minus one and true are common values, so a tensor that is not floating-point counts only if it
    was never written to.
    """
    found: list[tuple[str, torch.Tensor]] = []
    for name, tensor in _named(stage):
        if name not in names or tensor.is_meta:
            continue
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.is_floating_point() or local.is_complex():
            found.append((name, _blank_places(local).any()))
        elif tensor._version == versions.get(name):
            found.append((name, _blank_places(local).all()))
    return [name for name, is_blank in found if is_blank]


def _is_blank(tensor: torch.Tensor) -> bool:
    return bool(_blank_places(tensor).all())


def _blank_places(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach()
    return data if data.dtype is torch.bool else _bits(data) == -1


def _describe(stage: nn.Module, names: list[str]) -> str:
    saved = set(stage.state_dict())
    unsaved = [name for name in names if name not in saved]
    listed = ", ".join(names[:_NAMED]) + (
        f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    )
    advice = (
        f"no checkpoint holds {', '.join(unsaved[:_NAMED])}, so compute that in initialize, which "
        "materialize calls with every module"
        if unsaved
        else "load them before the first step, or fill them in initialize"
    )
    return f"every tensor must be filled before the first step (never filled: {listed}); {advice}"
