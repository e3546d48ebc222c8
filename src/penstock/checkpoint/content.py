"""What a process has to save: tensors and plain values by key, with the model's own names.

Optimizer state is named after its parameter, as in torch's `get_optimizer_state_dict` with
`flatten_optimizer_state_dict`, so that the rank and the group of a parameter do not matter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import CheckpointError
from penstock.training.pipeline import Pipeline

__all__ = [
    "Content",
    "collect_content",
    "generator_states",
    "name_parameters",
    "optimizer_class",
    "restore_generators",
]


@dataclass(frozen=True, slots=True)
class Content:
    """Tensors and plain values by key; `aliases` are further names of what is saved once.

    `optimizer` is the class of the optimizer, if there is one.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    aliases: dict[str, str]
    optimizer: str | None


def collect_content(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer | None, rank: int
) -> Content:
    """Return what this process holds, without copying tensors."""
    shared = pipeline.shared_names
    items: dict[str, Any] = {"pipeline.random_step": pipeline.random_step}
    for name, value in pipeline.state_dict().items():
        if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
            raise CheckpointError(
                f"{name} must be a parameter or a buffer (got {type(value).__name__}, made by its "
                "module); keep it in a buffer, or save it as part of data"
            )
        items[f"model.{shared.get(name, name)}"] = value
    if optimizer is not None:
        items.update(_optimizer_items(optimizer, name_parameters(pipeline, optimizer)))
    items.update({f"random.{rank}.{k}": state for k, state in generator_states(pipeline).items()})
    tensors = {key: value for key, value in items.items() if isinstance(value, torch.Tensor)}
    values = {key: value for key, value in items.items() if key not in tensors}
    for key, value in values.items():
        _check_plain(key, value)
    kind = None if optimizer is None else optimizer_class(optimizer)
    return Content(tensors, values, shared, kind)


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class, as users import it where torch has it.

    >>> optimizer_class(torch.optim.SGD([torch.zeros(1)]))
    'torch.optim.SGD'
    """
    kind = type(optimizer)
    if vars(torch.optim).get(kind.__name__) is kind:
        return f"torch.optim.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def name_parameters(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer
) -> dict[torch.Tensor, str]:
    """Return the names under which the optimizer's parameters are saved."""
    shared = pipeline.shared_names
    names: dict[torch.Tensor, str] = {
        p: shared.get(name, name) for name, p in pipeline.named_parameters()
    }
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"the optimizer must hold parameters of the pipeline only (group {number} has "
                    f"another one of shape {list(parameter.shape)}); make the optimizer for "
                    "pipeline.parameters()"
                )
    return names


def generator_states(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators on the host and on the pipeline's devices."""
    states = {"cpu": torch.get_rng_state()}
    devices = {parameter.device for parameter in pipeline.parameters()}
    if any(device.type == "cuda" for device in devices):
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Set torch's generators to states by device: `cpu` and `cuda`."""
    for device, state in states.items():
        if device == "cuda":
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)


def _optimizer_items(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> Iterator[tuple[str, Any]]:
    for group in optimizer.param_groups:
        settings = {key: _plain(value) for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = names[parameter]
            for key, value in settings.items():
                yield f"optim.param_groups.{name}.{_one_word(key)}", value
            for key, value in optimizer.state.get(parameter, {}).items():
                if value is not None:
                    yield f"optim.state.{name}.{_one_word(key)}", value


def _plain(value: Any) -> Any:
    """Return a setting as a plain value; a learning rate may be a tensor of one number."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _one_word(key: object) -> str:
    """Return a key of an optimizer, which must not have a dot, because names have dots."""
    if not isinstance(key, str) or "." in key:
        raise CheckpointError(
            f"a key of the optimizer must be text without dots (got {key!r}); rename it"
        )
    return key


def _check_plain(key: str, value: object) -> None:
    items = value if isinstance(value, list | tuple) else [value]
    if not all(item is None or isinstance(item, bool | int | float | str) for item in items):
        raise CheckpointError(
            f"{key} must be a tensor, number, text, bool, None or a list of them (got "
            f"{type(value).__name__}); convert it"
        )
