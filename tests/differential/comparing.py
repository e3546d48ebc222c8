"""Where two runs of a case differ, and by how much."""

from collections.abc import Mapping

import torch

from tests.differential.observed import Numbers, step_of

__all__ = ["differences"]

# Of the largest number in a tensor, or of a thousandth of the largest in the step.
_LIMIT = 1e-9
# How many times as far as the plain model moves by itself a pipeline may be off.
_FACTOR = 30.0


def differences(
    found: Numbers, expected: Numbers, spread: Mapping[str, float] | None = None
) -> dict[str, str]:
    """What differs, by name, in words; `found` may leave out what another rank has.

    A tensor's scale is its own largest number, but at least a thousandth of the largest among
    the gradients of its step: zeros are zeros up to rounding. `spread` is how far each number of
    the plain model moves when its inputs are nudged (`sensitivity.py`).
    """
    least = {step: 1e-3 * size for step, size in _largest_by_step(expected).items()}
    spread = spread or {}
    wrong = {}
    for name, value in found.items():
        if name not in expected:
            wrong[name] = "the plain model has none"
            continue
        most = _FACTOR * spread.get(name, 0.0)
        words = _difference(value, expected[name], least.get(step_of(name), 1e-3), most)
        if words is not None:
            wrong[name] = words
    return wrong


def _largest_by_step(numbers: Numbers) -> dict[str, float]:
    """The largest finite number among the gradients of each step; later ones may diverge."""
    found: dict[str, float] = {}
    for name, value in numbers.items():
        if "gradient" in name and value is not None and value.numel():
            size = float(value.abs().max())
            if size < float("inf"):
                found[step_of(name)] = max(found.get(step_of(name), 0.0), size)
    return found


def _difference(
    found: torch.Tensor | None, expected: torch.Tensor | None, least: float, most: float
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
    if distance <= max(_LIMIT * scale, most):
        return None
    return f"differs by {distance:.3g} (largest {float(expected.abs().max()):.3g})"


def _words(value: torch.Tensor | None) -> str:
    return "none" if value is None else f"numbers up to {float(value.abs().max()):.3g}"


def _form(value: torch.Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}"
