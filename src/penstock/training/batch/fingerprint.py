"""Fingerprints of a step's arguments, by which ranks notice that they were given other data.

A fingerprint is of the form of a value, its plain constants, and a sample of each of its tensors:
a few hundred elements, which come to the host in one copy per device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from penstock.parallel.dtensor import own_part
from penstock.ranks.agreement import digest_of
from penstock.step.microbatches import Along, Ready, Shared
from penstock.torch_private import is_traceable_wrapper_subclass

__all__ = ["Fingerprint", "fingerprints"]

# How many elements of a tensor are looked at.
_SAMPLE = 256
# 2**64 over the golden ratio: its multiples lie evenly, and in no regular distance of each other.
_SPREAD = 11400714819323198485
# As what the elements of a tensor are read, by their bytes: whatever they mean, NaN included.
_AS_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The most characters of a form that an error shows.
_LONGEST_FORM = 80


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The form of a value as text, and a digest of its form and content."""

    form: str
    digest: str


def fingerprints(named: Mapping[str, Any]) -> dict[str, Fingerprint]:
    """Return the fingerprint of every argument that is given; None counts as left out.

    >>> fingerprints({"x": torch.zeros(2), "mask": None})["x"].form
    '(2,) torch.float32'
    """
    samples: list[torch.Tensor] = []
    forms: dict[str, tuple[str, slice]] = {}
    with torch.no_grad():
        for name, value in named.items():
            if value is not None:
                begin = len(samples)
                forms[name] = _look(value, samples), slice(begin, len(samples))
        found = _to_host(samples)
    return {
        name: Fingerprint(_shorten(form), _digest(form, found[held]))
        for name, (form, held) in forms.items()
    }


def _look(value: Any, samples: list[torch.Tensor]) -> str:
    """Return the form of a value, and add a sample of each of its tensors."""
    match value:
        case torch.Tensor():
            return _look_at_tensor(value, samples)
        case Ready():
            return f"Ready({_look(list(value.items), samples)})"
        case Shared():
            return f"Shared({_look(value.value, samples)})"
        case Along():
            return f"Along({_look(value.value, samples)}, {value.dim})"
        case Mapping():
            items = sorted(value.items(), key=lambda item: repr(item[0]))
            return f"{{{', '.join(f'{key!r}: {_look(one, samples)}' for key, one in items)}}}"
        case list() | tuple():
            return f"[{', '.join(_look(one, samples) for one in value)}]"
        case None | bool() | int() | float() | complex() | str() | bytes():
            return repr(value)
        case _:
            return type(value).__name__


def _look_at_tensor(tensor: torch.Tensor, samples: list[torch.Tensor]) -> str:
    form = f"{tuple(tensor.shape)} {tensor.dtype}"
    local = own_part(tensor.detach())
    # Tensors without numbers, or with a layout of their own, are known by their form.
    is_plain = local.layout is torch.strided and not (local.is_meta or local.is_quantized)
    if is_plain and not (local.is_nested or is_traceable_wrapper_subclass(local)):
        plain = local.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        numbers = torch.view_as_real(plain) if plain.is_complex() else plain
        if numbers.element_size() in _AS_NUMBERS:
            samples.append(_sample(numbers.view(_AS_NUMBERS[numbers.element_size()])))
    return form


def _sample(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bytes of elements from all over a tensor, without a copy of the whole of it."""
    if numbers.dim() == 0:
        return numbers.reshape(1).view(torch.uint8)
    where = np.unravel_index(_positions(numbers.numel()), tuple(numbers.shape))
    return numbers[tuple(map(torch.from_numpy, where))].view(torch.uint8)


@lru_cache(maxsize=64)
def _positions(total: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return which of all elements to sample; even distances could hit a single column.

    >>> _positions(4).tolist(), len(_positions(10**12))
    ([0, 1, 2, 3], 256)
    """
    if total <= _SAMPLE:
        return np.arange(total)
    return np.array([(n * _SPREAD % 2**64) * total >> 64 for n in range(_SAMPLE)], dtype=np.int64)


def _to_host(samples: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the bytes of every sample, in one copy from each device."""
    found = [b""] * len(samples)
    for device in {sample.device for sample in samples}:
        numbers = [n for n, sample in enumerate(samples) if sample.device == device]
        data = torch.cat([samples[n] for n in numbers]).cpu().numpy().tobytes()
        for n in numbers:
            found[n], data = data[: samples[n].numel()], data[samples[n].numel() :]
    return found


def _digest(form: str, samples: Sequence[bytes]) -> str:
    return digest_of(b"".join([form.encode(), *samples])).hex()


def _shorten(form: str) -> str:
    return form if len(form) <= _LONGEST_FORM else f"{form[:_LONGEST_FORM]}..."
