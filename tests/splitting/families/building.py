"""Builds one small model of a family, with inputs that it runs on."""

import os
import random
import time
from dataclasses import dataclass
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.splitting.families.configs import small_configs
from tests.splitting.families.inputs import make_inputs, rows_of
from tests.splitting.families.libraries import make_model, without_zeros

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
_MOST_SECONDS = 10
_MOST_PARAMETERS = 25_000_000


@dataclass(frozen=True)
class Built:
    """A model with inputs, in float64 where it allows that, and whether it is in training mode.

    Inputs that are `shared` have no rows.
    """

    model: nn.Module
    inputs: dict[str, Any]
    is_training: bool
    shared: tuple[str, ...] = ()


def families() -> list[str]:
    """Return the model types of the release that have a class for a task or a base model.

    They are shuffled, always in the same way, so that the first of them are a fair sample.
    """
    found = sorted(kind for kind in CONFIG_MAPPING if _classes(kind))
    random.Random(0).shuffle(found)
    return found


def _classes(kind: str) -> list[str]:
    found: list[str] = []
    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in _TASKS]
    for table in (*tables, modeling_auto.MODEL_MAPPING_NAMES):
        names = table.get(kind, ())
        found += [names] if isinstance(names, str) else list(names)
    return [name for name in dict.fromkeys(found) if hasattr(transformers, name)]


def build(kind: str) -> Built | str:
    """Return the same small model every time, or why there is none."""
    if "/" in kind:
        return _build_of_library(kind)
    reason, began = "", time.process_time()
    for name in _classes(kind):
        for make_config in small_configs(kind):
            if time.process_time() > began + _MOST_SECONDS:
                return f"no sizes and inputs of ours fit within {_MOST_SECONDS} s: {reason}"
            try:
                return _build(make_config(), getattr(transformers, name))
            except Exception as error:  # whatever a family raises for sizes that it cannot have
                text = " ".join(f"{type(error).__name__}: {error}".split())
                reason = reason or text[:200]
    return reason or "no class"


def _build(config: Any, made: Any) -> Built:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in made(config).parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"it has {count:,} parameters")
    first: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        model = without_zeros(made(config)).to(dtype)
        for is_training in (True, False):
            model.train(is_training)
            for inputs in make_inputs(model, dtype):
                try:
                    _run_alike(model, inputs)
                    return Built(model, inputs, is_training)
                except Exception as error:  # whatever a family raises for inputs of another form
                    first = first or error
    raise first or ValueError("we know no input that it takes")


def _build_of_library(kind: str) -> Built | str:
    torch.manual_seed(0)
    reason = ""
    for dtype in (torch.float64, torch.float32):
        for is_training in (True, False):
            try:
                model, given, shared = make_model(kind)
                inputs = {
                    name: value.to(dtype)
                    if isinstance(value, torch.Tensor) and value.is_floating_point()
                    else value
                    for name, value in given.items()
                }
                without_zeros(model).to(dtype).train(is_training)
                _run_alike(model, inputs, shared)
                return Built(model, inputs, is_training, shared)
            except Exception as error:  # whatever a library raises
                reason = reason or " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return reason


def _run_alike(model: nn.Module, inputs: dict[str, Any], shared: tuple[str, ...] = ()) -> None:
    """Raise unless the model runs on the whole and on its rows, the same way twice."""
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            first = _first(model(**inputs))
            again = _first(model(**inputs))
            _first(model(**rows_of(inputs, 1, shared)))
    finally:
        torch.set_rng_state(state)
    if not bool(first.isfinite().all()):
        raise ValueError("its output is not finite")
    if not torch.equal(first, again):
        raise ValueError("it draws random numbers in its forward, or counts its calls")


def _first(output: Any) -> torch.Tensor:
    from tests.splitting.checking import first_tensor

    return first_tensor(output)
