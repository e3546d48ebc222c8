"""Pipelines in the Trainer of Hugging Face, and in loops of one's own with its Accelerator."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.integrations.requirements import needs

if TYPE_CHECKING:
    from penstock.integrations.hugging_face.accelerator import PipelineAccelerator
    from penstock.integrations.hugging_face.trainer import PipelineTrainer
    from penstock.integrations.layout import PipelineConfig

__all__ = ["PipelineAccelerator", "PipelineConfig", "PipelineTrainer"]

_MODULES = {
    "PipelineAccelerator": "penstock.integrations.hugging_face.accelerator",
    "PipelineConfig": "penstock.integrations.layout",
    "PipelineTrainer": "penstock.integrations.hugging_face.trainer",
}
_LIBRARIES = ("accelerate", "safetensors", "transformers")


def __getattr__(name: str) -> Any:
    """Load a name when it is first used, and say what to install if a library is missing."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs(*_LIBRARIES, by=__name__, extra="hugging-face"):
        return getattr(import_module(_MODULES[name]), name)
