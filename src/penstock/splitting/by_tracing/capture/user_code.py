"""Distinguishes lines of the user's model from lines of torch and of tracing itself."""

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

__all__ = ["calling_line", "is_user_code", "user_line"]

_TORCH = Path(torch.__file__).parent
_TORCH_MODULES = _TORCH / "nn"
_TRACING = Path(__file__).parent


def is_user_code(file: Path) -> bool:
    """Return whether a file is part of a model; torch's own modules are."""
    is_inside_torch = file.is_relative_to(_TORCH) and not file.is_relative_to(_TORCH_MODULES)
    return not is_inside_torch and not file.is_relative_to(_TRACING)


def user_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the first line that is not in torch itself, as file, number and text."""
    for frame, number in frames:
        file = Path(frame.f_code.co_filename)
        if is_user_code(file):
            summary = traceback.FrameSummary(str(file), number, frame.f_code.co_name)
            text = (summary.line or "").strip()
            return f"{file.name}:{number}" + (f" `{text}`" if text else "")
    return ""


def calling_line() -> str:
    """Return the line of the model that is running, as file, number and text."""
    return user_line(traceback.walk_stack(sys._getframe()))
