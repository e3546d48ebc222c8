"""Distinguishes lines of the user's model from lines of torch and of tracing itself."""

from pathlib import Path

import torch

__all__ = ["is_user_code"]

_TORCH = Path(torch.__file__).parent
_TORCH_MODULES = _TORCH / "nn"
_TRACING = Path(__file__).parent


def is_user_code(file: Path) -> bool:
    """Return whether a file is part of a model; torch's own modules are."""
    is_inside_torch = file.is_relative_to(_TORCH) and not file.is_relative_to(_TORCH_MODULES)
    return not is_inside_torch and not file.is_relative_to(_TRACING)
