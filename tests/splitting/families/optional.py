"""Makes torchvision importable where its compiled operators cannot be loaded.

The wheel of torchvision is for CUDA, and its operators (`nms` and others for boxes) do not load
beside torch for CPUs. No model here calls them, but the import asks for two of their names.
"""

import importlib
import sys
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["prepare_torchvision"]

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARY: Any = torch.library.Library  # untyped upstream
_DECLARED: list[Any] = []


def prepare_torchvision() -> bool:
    """Import torchvision, if it is installed, and return whether it is."""
    if find_spec("torchvision") is None:
        return False
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # its operators do not exist
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        library: Any = _LIBRARY("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}{_SIGNATURE}")
        _DECLARED.append(library)
        importlib.import_module("torchvision")
    return True
