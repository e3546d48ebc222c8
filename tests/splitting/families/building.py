"""Builds one small model of a family, with inputs that it runs on."""

import os
from dataclasses import dataclass
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.splitting.families.configs import small_config
from tests.splitting.families.inputs import make_inputs

__all__ = ["Built", "build", "families"]

# The tasks of which the first that a family has gives its class.
_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MULTIMODAL_LM",
    "CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "SEQUENCE_CLASSIFICATION",
)
_MOST_PARAMETERS = 5_000_000


@dataclass(frozen=True)
class Built:
    """A model in float64 with inputs, and whether it is in training mode."""

    model: nn.Module
    inputs: dict[str, Any]
    is_training: bool


def families() -> list[str]:
    """Return the model types of the release that have a class for a task or a base model."""
    return [kind for kind in CONFIG_MAPPING if _classes(kind)]


def _classes(kind: str) -> list[str]:
    found: list[str] = []
    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in _TASKS]
    for table in (*tables, modeling_auto.MODEL_MAPPING_NAMES):
        names = table.get(kind, ())
        found += [names] if isinstance(names, str) else list(names)
    return [name for name in dict.fromkeys(found) if hasattr(transformers, name)]


def build(kind: str) -> Built | str:
    """Return the same small model every time, or why there is none."""
    reason = "no class"
    for name in _classes(kind):
        try:
            return _build(kind, getattr(transformers, name))
        except Exception as error:  # whatever a family raises for sizes that it cannot have
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return reason


def _build(kind: str, made: Any) -> Built:
    config = small_config(kind)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in made(config).parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"it has {count:,} parameters")
    torch.manual_seed(0)
    model = made(config).double()
    for is_training in (True, False):
        model.train(is_training)
        for inputs in make_inputs(model):
            if _runs_alike(model, inputs):
                return Built(model, inputs, is_training)
    raise ValueError("it runs on no inputs of ours")


def _runs_alike(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Return whether the model runs on the whole and on its rows, the same way twice."""
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            first = _first(model(**inputs))
            again = _first(model(**inputs))
            _first(model(**{name: value[1:2] for name, value in inputs.items()}))
    except Exception:  # whatever a family raises for inputs of another form
        return False
    finally:
        torch.set_rng_state(state)
    return bool(first.isfinite().all()) and torch.equal(first, again)


def _first(output: Any) -> torch.Tensor:
    from tests.splitting.checking import first_tensor

    return first_tensor(output)
