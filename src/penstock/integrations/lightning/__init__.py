"""Pipelines in Lightning: strategies for its Trainer and for Fabric."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.integrations.requirements import needs

if TYPE_CHECKING:
    from penstock.integrations.layout import PipelineConfig
    from penstock.integrations.lightning.fabric import PipelineFabricStrategy
    from penstock.integrations.lightning.strategy import PipelineStrategy

__all__ = ["PipelineConfig", "PipelineFabricStrategy", "PipelineStrategy"]

_MODULES = {
    "PipelineConfig": "penstock.integrations.layout",
    "PipelineFabricStrategy": "penstock.integrations.lightning.fabric",
    "PipelineStrategy": "penstock.integrations.lightning.strategy",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used, and say what to install if a library is missing."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("lightning", "torchmetrics", by=__name__, extra="lightning"):
        return getattr(import_module(_MODULES[name]), name)
