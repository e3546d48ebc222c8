"""Caches of keys and values: models as they are loaded make one, and no stage has the whole of it.

The configuration says so (`use_cache`); while a model is traced, looked at or run in stages, it
says that there is none.
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
    """The configurations in a model that say whether to make a cache, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "use_cache"):
            found[id(config)] = config
    return tuple(found.values())


def log_ignored_cache(model: nn.Module) -> None:
    """Say once, when a model is split, that its cache is switched off.

    It is logged and not warned of, since models are configured so when they are loaded. Encoders
    are too, but take no cache and make none.
    """
    takes = inspect.signature(model.forward).parameters.keys() & {"use_cache", "past_key_values"}
    if takes and any(config.use_cache for config in find_configs(model)):
        _LOGGER.warning(
            "use_cache=True of the model's configuration is ignored in the stages: they make no "
            "cache of keys and values, and outputs have none (set it to False to read this no "
            "more)"
        )


def refuse_cache(configs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call that asks for a cache in so many words."""
    if configs and kwargs.get("use_cache"):
        raise ModelError(
            "use_cache=True asks for a cache of keys and values, of which every stage would have "
            "a part only; leave it out"
        )


@contextmanager
def without_cache(configs: Sequence[Any]) -> Iterator[None]:
    """Let a model make no cache meanwhile."""
    changed = [config for config in configs if config.use_cache]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True
