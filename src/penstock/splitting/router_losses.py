"""Losses that keep experts evenly busy, which models compute for what they are given at a time.

Such a loss is a product of means over tokens, so that its mean over microbatches is not that of
the whole batch. Its gradient needs the counts of every microbatch before the first backward.
"""

from collections.abc import Iterator, Mapping
from logging import getLogger
from typing import Any

from torch import nn

__all__ = ["log_router_loss"]

_LOGGER = getLogger(__name__)
_FACTOR, _SWITCH = "router_aux_loss_coef", "output_router_logits"


def log_router_loss(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Log when a model is split that its router's loss will be that of microbatches.

    `kwargs` is what the example asks for beyond the model's configuration.
    """
    for config in _configs(model):
        is_on = kwargs.get(_SWITCH, getattr(config, _SWITCH, False))
        if is_on and getattr(config, _FACTOR, 0):
            _LOGGER.warning(
                "the loss of the model's routers (%s=%s) is computed for each microbatch: with "
                "several, that of a step is their mean, as with gradient accumulation, and not "
                "that of the whole batch (set %s=False to train without it)",
                _FACTOR,
                getattr(config, _FACTOR),
                _SWITCH,
            )
            return


def _configs(model: nn.Module) -> Iterator[Any]:
    return (config for m in model.modules() if (config := vars(m).get("config")) is not None)
