"""The lists of layers that a model runs on an example, in the order in which it runs them.

calls                      lists
a.0 a.1 b.0 b.1            a, b
b.0 b.1                    b; a does not run
a.0 b.0 a.1 b.1            the larger of them; layers of both cannot be cut between
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.modules.compiled import run_eagerly
from penstock.modules.untouched import untouched
from penstock.splitting.by_layers.towers import count_lists, find_towers
from penstock.splitting.caches import find_configs, without_cache

__all__ = ["find_called_towers", "settle_towers"]


def find_called_towers(
    model: nn.Module, stages: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    """Return the paths of the model's lists of layers; a tower that is not called is left out.

    The model is run only if it has several lists at all. One on the meta device is not run: its
    lists come in the order of registration.
    """
    found = find_towers(model, stages)
    if count_lists(model) == 1 or any(parameter.is_meta for parameter in model.parameters()):
        return found
    return settle_towers(model, stages, found, lambda lists: _called(model, lists, args, kwargs))


def settle_towers(
    model: nn.Module, stages: int, found: list[str], run: Callable[[list[str]], list[str]]
) -> list[str]:
    """Return lists of layers by their first call, without those that cannot be cut between.

    `run` returns, for some lists, the list of every layer that is called, in order.
    """
    left_out: list[str] = []
    while True:
        calls = run(found)
        unused = [path for path in found if path not in calls]
        by_turns = _by_turns(model, calls)
        if not unused and not by_turns:
            return list(dict.fromkeys(calls))
        left_out += unused or by_turns[:1]
        try:
            found = find_towers(model, stages, without=left_out)
        except ModelError:
            if unused or len(by_turns) < 2:
                raise
            left_out = [*left_out[:-1], by_turns[1]]
            found = find_towers(model, stages, without=left_out)


def _by_turns(model: nn.Module, calls: Sequence[str]) -> list[str]:
    """Return lists whose layers run by turns, the smallest first."""
    runs = [path for path, _ in groupby(calls)]
    again = [path for path in runs if runs.count(path) > 1]
    if not again:
        return []
    last = len(runs) - runs[::-1].index(again[0])
    between = dict.fromkeys(runs[runs.index(again[0]) : last])
    return sorted(between, key=lambda path: _size(model.get_submodule(path)))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _called(
    model: nn.Module, lists: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    """Return the list of each layer that the model calls, in order."""
    called: list[str] = []
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
    return called


def _note(called: list[str], path: str, _module: nn.Module, _args: Any) -> None:
    called.append(path)
