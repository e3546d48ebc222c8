"""Caches of keys and values, which many models make by default and no stage would have whole.

The model's configuration asks for them (`use_cache`). It is switched off while a model is traced,
run on an example, or run in stages.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import getLogger
from typing import Any

from torch import nn

from penstock.errors import ModelError

__all__ = ["find_configs", "log_ignored_cache", "refuse_cache", "without_cache"]

_LOGGER = getLogger(__name__)


def find_configs(model: nn.Module) -> tuple[Any, ...]:
    """Return the configurations in a model that have `use_cache`, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "use_cache"):
            found[id(config)] = config
    return tuple(found.values())


def log_ignored_cache(model: nn.Module) -> None:
    """Log when a model is split that its cache is switched off.

    This is not a warning, because models are configured so by default. Encoders are configured so
    too, but make no cache.
    """
    takes = inspect.signature(model.forward).parameters.keys() & {"use_cache", "past_key_values"}
    if takes and any(config.use_cache for config in find_configs(model)):
        _LOGGER.warning(
            "use_cache=True of the model's configuration is ignored in the stages: they make no "
            "cache of keys and values, and outputs have none (set it to False to silence this)"
        )


def refuse_cache(configs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a call asks for a cache explicitly."""
    if configs and kwargs.get("use_cache"):
        raise ModelError(
            "use_cache=True asks for a cache of keys and values, of which every stage would have "
            "only a part; leave it out"
        )


@contextmanager
def without_cache(configs: Sequence[Any]) -> Iterator[None]:
    """Switch caches off meanwhile."""
    changed = [config for config in configs if config.use_cache]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True
