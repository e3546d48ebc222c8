"""Whether what was saved of an optimizer fits the one that asks for it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.checkpoint.content import optimizer_class
from penstock.checkpoint.manifest import Manifest
from penstock.errors import CheckpointError
from penstock.untrusted import quote

__all__ = ["check_kind", "check_setting", "check_state"]


def check_kind(saved: str | None, current: str, *, is_other_allowed: bool) -> None:
    """Refuse the state of another optimizer, unless that is what was asked for."""
    if saved is None:
        raise CheckpointError(
            "the checkpoint must have the state of an optimizer (it was saved without one); load "
            "it without the optimizer"
        )
    if saved != current and not is_other_allowed:
        raise CheckpointError(
            f"the optimizer must be the one that was saved, {quote(saved)} (got "
            f"{quote(current)}); load without the optimizer, or with allow_other_optimizer=True "
            "if its state has the same meaning"
        )


def check_state(
    manifest: Manifest,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    kept: Mapping[str, Sequence[str]],
) -> None:
    """Refuse state that an optimizer of torch cannot have for the parameters of one group.

    Its tensors have the shape of their parameter, or 1 along some dimensions, or are one number.
    Parameters of as many dimensions have the same, or none yet. Others may have what they like.
    """
    if not optimizer_class(optimizer).startswith("torch.optim."):
        return
    firsts: dict[int, str] = {}
    for name, parameter in parameters.items():
        own = kept.get(name, ())
        if not own:
            continue
        first = firsts.setdefault(parameter.dim(), name)
        if set(own) != set(kept[first]):
            different = min(set(own) ^ set(kept[first]))
            raise CheckpointError(
                f"the optimizer's state of {quote(name)} and {quote(first)} must have the same "
                f"keys ({quote(different)} is missing for one of them)"
            )
        for last in own:
            saved = manifest.tensors.get(f"optim.state.{name}.{last}")
            if saved is not None and not _fits(saved.shape, tuple(parameter.shape)):
                raise CheckpointError(
                    f"the optimizer's {quote(last)} of {quote(name)} must fit the shape "
                    f"{list(parameter.shape)} of its parameter (got {quote(list(saved.shape))})"
                )


def _fits(shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    if not shape:
        return True
    return len(shape) == len(parameter) and all(
        size in (1, whole) for size, whole in zip(shape, parameter, strict=True)
    )


def check_setting(key: str, saved: Any, current: Any, default: Any) -> None:
    """Refuse a setting of another type than the optimizer has now."""
    if current is None or (saved is None and default is None):
        return
    if _kind(saved) != _kind(current):
        raise CheckpointError(
            f"the optimizer's setting {quote(key)} must be {_kind(current)} (the checkpoint has "
            f"{quote(saved)})"
        )


def _kind(value: Any) -> str:
    """Return the type of a setting in words, as far as JSON keeps it."""
    match value:
        case None:
            return "None"
        case bool():
            return "a bool"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case torch.Tensor():
            return "a number" if value.dim() == 0 else _kind(value.tolist())
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return type(value).__name__
