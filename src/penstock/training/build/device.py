"""The device that a process's stages run on: as given, else where their parameters are."""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.errors import ArgumentError

__all__ = ["find_device", "require_carrier"]


def find_device(
    given: torch.device | str | None,
    stages: Mapping[int, nn.Module],
    group: dist.ProcessGroup | None = None,
) -> torch.device:
    """Return the device of these stages: the one given, if this process has it and they are on it.

    Without one, return that of their parameters, else of their buffers, else the one that `group`
    is made for.

    >>> find_device(None, {0: nn.Linear(2, 2)})
    device(type='cpu')
    """
    _refuse_meta(stages)
    if given is None:
        device = _device_of_stages(stages) or _device_of_group(group)
    else:
        device = _existing(given)
        _require_on(device, stages)
    if group is not None:
        require_carrier(dist.get_backend(group), device)
    return device


def _device_of_group(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device whose memory a group's backend sends from."""
    if group is None or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return _existing("cuda")


def require_carrier(backend: str, device: torch.device) -> None:
    """Refuse a group that cannot send tensors of this device; gloo sends from any."""
    if backend != "gloo" and device.type != "cuda":
        raise ArgumentError(
            f"stages must be on a CUDA device with backend {backend!r} (got {device}); move them "
            "with stage.to('cuda'), or give a group made with backend 'gloo'"
        )


def _existing(given: torch.device | str) -> torch.device:
    """Return a device with its number, if this process has it and it has memory."""
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise ArgumentError(
            f"device must be one that torch knows (got {given!r}): {error}"
        ) from error
    if device.type == "meta":
        raise ArgumentError(
            "device must have memory (got 'meta'); give the device that the stages run on, or "
            "leave device out"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            f"device must be one that this process has (got {str(given)!r}, CUDA devices here: "
            f"{torch.cuda.device_count()}); give another, or leave device out to run where the "
            "stages are"
        )
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"device must be one that this process has (got {str(given)!r}): {error}"
        ) from error


def _device_of_stages(stages: Mapping[int, nn.Module]) -> torch.device | None:
    """Return the one device of all parameters, or of all buffers where there are none."""
    for kind in ("parameter", "buffer"):
        found: dict[torch.device, str] = {}
        for stage, name, tensor in _tensors(stages, kind):
            found.setdefault(_home(tensor), f"{kind} {name!r} of stage {stage}")
        if len(found) > 1:
            where = ", ".join(f"{name} on {device}" for device, name in found.items())
            raise ArgumentError(
                f"the stages of this process must be on one device ({where}); give device= to say "
                "where values enter and leave them"
            )
        if found:
            return next(iter(found))
    return None


def _require_on(device: torch.device, stages: Mapping[int, nn.Module]) -> None:
    """Refuse a stage that has no parameter on the device that was given."""
    for stage, module in stages.items():
        homes = {name: _home(p) for _, name, p in _tensors({stage: module}, "parameter")}
        if homes and device not in homes.values():
            name, home = next(iter(homes.items()))
            raise ArgumentError(
                f"parameter {name!r} of stage {stage} is on {home}, but device is {device}; move "
                f"the stage with .to({str(device)!r}), or leave device out to run where it is"
            )


def _refuse_meta(stages: Mapping[int, nn.Module]) -> None:
    for stage, name, parameter in _tensors(stages, "parameter"):
        if parameter.is_meta:
            raise ArgumentError(
                f"parameter {name!r} of stage {stage} must have memory (it is on the meta "
                "device); call pipe.materialize or stage.to_empty first"
            )


def _tensors(
    stages: Mapping[int, nn.Module], kind: str
) -> Iterator[tuple[int, str, torch.Tensor]]:
    for stage, module in stages.items():
        named: Iterable[tuple[str, torch.Tensor]]
        named = module.named_parameters() if kind == "parameter" else module.named_buffers()
        for name, tensor in named:
            yield stage, name, tensor


def _home(tensor: torch.Tensor) -> torch.device:
    """Return where a tensor is used: one that is offloaded to the host goes to its mesh."""
    if isinstance(tensor, DTensor) and tensor.device.type != tensor.device_mesh.device_type:
        return _existing(tensor.device_mesh.device_type)
    return tensor.device
