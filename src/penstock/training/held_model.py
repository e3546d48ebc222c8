"""The part of the model that this process holds, under the names of the whole model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock.errors import ModelError
from penstock.training.batch.batch import unwrap

__all__ = ["HeldModel", "fit_value"]

# How many names an error shows.
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class HeldModel:
    """The modules of this process's stages, and how their parameters are named.

    The names are the model's own if it came as a `Pipe` (`has_own_names`), else those of an
    `nn.Sequential` of all stages. `shared_names` maps every further name of a parameter that has
    several to its first one.
    """

    modules: Mapping[int, nn.Module]
    has_own_names: bool
    shared_names: Mapping[str, str]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter once, with its name."""
        seen: set[nn.Parameter] = set()
        for stage, module in self.modules.items():
            for name, parameter in unwrap(module).named_parameters(remove_duplicate=False):
                if parameter not in seen:
                    seen.add(parameter)
                    yield self._name(stage, name), parameter

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and buffers by name."""
        return {
            self._name(stage, name): value
            for stage, module in self.modules.items()
            for name, value in unwrap(module).state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Take this process's part of a state; other names in it belong to other ranks."""
        found = {stage: self._take(stage, state, strict=strict) for stage in self.modules}
        for stage, part in found.items():
            unwrap(self.modules[stage]).load_state_dict(part, strict=strict)

    def _name(self, stage: int, name: str) -> str:
        return name if self.has_own_names else f"{stage}.{name}"

    def _take(self, stage: int, state: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
        """Return what a state has for one stage, by the stage's own names."""
        part: dict[str, Any] = {}
        missing: list[str] = []
        for name, held in unwrap(self.modules[stage]).state_dict().items():
            full = self._name(stage, name)
            known = full if full in state else self.shared_names.get(full, full)
            if known in state:
                part[name] = fit_value(full, held, state[known])
            else:
                missing.append(full)
        if missing and strict:
            more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
            raise ModelError(
                f"the state must have every name of stage {stage} (missing: "
                f"{', '.join(map(repr, missing[:_MOST_NAMES]))}{more}); give the state of this "
                "model, or strict=False"
            )
        return part


def fit_value(name: str, held: Any, value: Any) -> Any:
    """Return a value in the form that a module takes it; a whole tensor is sharded if need be."""
    if not isinstance(held, torch.Tensor) or not isinstance(value, torch.Tensor):
        return value
    if held.shape != value.shape:
        raise ModelError(
            f"{name!r} must have the shape {tuple(held.shape)} (got {tuple(value.shape)}); give "
            "the state of this model"
        )
    if isinstance(held, DTensor) and not isinstance(value, DTensor):
        whole = value.to(held.device)
        # Every rank has the whole value, so none of it has to be sent.
        return distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
    return value
