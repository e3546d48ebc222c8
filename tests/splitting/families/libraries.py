"""Builds one small model of diffusers, timm or torchvision, named as "timm/convnext_atto"."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from tests.splitting.families.diffusion import DIFFUSION
from tests.splitting.families.inputs import ROWS
from tests.splitting.families.optional import prepare_torchvision
from tests.splitting.families.vision import TIMM, TORCHVISION, VISION_SIZE

__all__ = ["LIBRARIES", "is_installed", "make_model", "without_zeros"]

# The modules of classes of timm that `create_model` does not make in any size.
_CLASSES = {"MlpMixer": "mlp_mixer", "MetaFormer": "metaformer"}
LIBRARIES = {
    "diffusers": tuple(f"diffusers/{name}" for name in DIFFUSION),
    "timm": tuple(f"timm/{name}" for name in TIMM),
    "torchvision": tuple(f"torchvision/{name}" for name in TORCHVISION),
}


def is_installed(library: str) -> bool:
    """Return whether a library can be imported; timm needs torchvision."""
    if library != "diffusers" and find_spec("torchvision") is None:
        return False
    return find_spec(library) is not None


def make_model(kind: str) -> tuple[nn.Module, dict[str, Any], tuple[str, ...]]:
    """Return a model, inputs for it, and the names of inputs that all rows share."""
    library, _, name = kind.partition("/")
    prepare_torchvision()
    if library == "diffusers":
        sizes, make_inputs, shared = DIFFUSION[name]
        made: Any = getattr(import_module("diffusers"), name)
        return made(**sizes), make_inputs(), shared
    pictures = torch.randn(
        ROWS, 3, VISION_SIZE, VISION_SIZE, generator=torch.Generator().manual_seed(1)
    )
    if library == "timm":
        created = _make_of_timm(name)
        return created, {"x": pictures}, ()
    models = import_module("torchvision.models")
    found: Any = getattr(models, name, None) or getattr(
        import_module("torchvision.models.swin_transformer"), name
    )
    return found(num_classes=4, **TORCHVISION[name]), {"x": pictures}, ()


def _make_of_timm(name: str) -> nn.Module:
    models: Any = import_module("timm.models")
    made: nn.Module
    if name in _CLASSES:
        made = getattr(getattr(models, _CLASSES[name]), name)(num_classes=4, **TIMM[name])
    else:
        made = models.create_model(name, num_classes=4, **TIMM[name])
    return made


def without_zeros(model: nn.Module) -> nn.Module:
    """Fill parameters that begin as zeros: no gradient goes through such heads and gates."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model
