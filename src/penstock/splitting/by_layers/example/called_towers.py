"""The lists of layers that a model runs on an example, in the order in which it runs them."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.modules.compiled import run_eagerly
from penstock.modules.untouched import untouched
from penstock.splitting.by_layers.towers import find_towers
from penstock.splitting.caches import find_configs, without_cache

__all__ = ["find_called_towers"]


def find_called_towers(
    model: nn.Module, stages: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    """Return the paths of the model's lists of layers; a tower that is not called is left out.

    The model is run only if it has several. One on the meta device is not run: its lists come in
    the order of registration.
    """
    found = find_towers(model, stages)
    if len(found) == 1 or any(parameter.is_meta for parameter in model.parameters()):
        return found
    unused: list[str] = []
    while True:
        called = _called(model, found, args, kwargs)
        if len(called) == len(found):
            return called
        unused += [path for path in found if path not in called]
        found = find_towers(model, stages, without=unused)


def _called(
    model: nn.Module, lists: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    """Return those of these lists that have a layer which is called, by their first call."""
    called: dict[str, None] = {}
    with ExitStack() as stack:
        for context in (
            untouched([model]),
            torch.no_grad(),
            without_cache(find_configs(model)),
            run_eagerly(model),
        ):
            stack.enter_context(context)
        for path in lists:
            for layer in model.get_submodule(path).children():
                hook = layer.register_forward_pre_hook(partial(_note, called, path))
                stack.callback(hook.remove)
        model(*args, **kwargs)
    return list(called)


def _note(called: dict[str, None], path: str, _module: nn.Module, _args: Any) -> None:
    called[path] = None
