"""Where two runs of a case differ, and by how much."""

from collections.abc import Mapping

import torch

from tests.differential.observed import Numbers

__all__ = ["differences"]

# Of the largest number in a tensor, or of a thousandth of the largest in the step.
_LIMIT = 1e-9


def differences(found: Numbers, expected: Numbers) -> dict[str, str]:
    """What differs, by name, in words; `found` may leave out what another rank has.

    A tensor's scale is its own largest number, but at least a thousandth of the largest among
    the gradients of the case: zeros are zeros up to rounding.
    """
    least = 1e-3 * _largest(expected)
    wrong = {}
    for name, value in found.items():
        if name not in expected:
            wrong[name] = "the plain model has none"
        elif (words := _difference(value, expected[name], least)) is not None:
            wrong[name] = words
    return wrong


def _largest(numbers: Mapping[str, torch.Tensor | None]) -> float:
    values = [
        float(value.abs().max())
        for name, value in numbers.items()
        if "gradient" in name and value is not None and value.numel()
    ]
    return max([value for value in values if value < float("inf")], default=1.0)


def _difference(
    found: torch.Tensor | None, expected: torch.Tensor | None, least: float
) -> str | None:
    if found is None or expected is None:
        if found is expected:
            return None
        return f"{_words(found)}, in the plain model {_words(expected)}"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{_form(found)}, in the plain model {_form(expected)}"
    if not found.numel():
        return None
    scale = max(float(expected.where(expected.isfinite(), 0).abs().max()), least)
    # Training may diverge in the plain model too: what is infinite in both is not a difference.
    has_diverged = ~found.isfinite() & ~expected.isfinite()
    distance = float((found - expected).where(~has_diverged, 0).abs().max())
    if has_diverged.all():
        return None
    if distance <= _LIMIT * scale:
        return None
    return f"differs by {distance:.3g} (largest {float(expected.abs().max()):.3g})"


def _words(value: torch.Tensor | None) -> str:
    return "none" if value is None else f"numbers up to {float(value.abs().max()):.3g}"


def _form(value: torch.Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}"
