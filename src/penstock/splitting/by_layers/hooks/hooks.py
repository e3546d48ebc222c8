"""Forward hooks of modules, and how a stage that does not have the module calls them.

Models collect what their layers return with forward hooks. A stage that does not have a layer
calls the layer's hooks too, with received values or stand-ins, so that what they collect has the
same positions on every stage. Hooks that torch or this package has registered (for sharding,
weight norms, our own) are called only on the stage that has the module.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_layers.stand_ins import StandIn, stand_in
from penstock.torch_private import (
    global_forward_hooks,
    global_forward_hooks_with_kwargs,
    global_forward_pre_hooks,
    tree_map_only,
)

__all__ = [
    "GLOBAL_TABLES",
    "Given",
    "HereOnly",
    "Hook",
    "HookTables",
    "call_hooks",
    "call_pre_hooks",
    "code_of",
    "here_only",
    "is_active",
    "is_foreign",
    "keeping_hooks",
    "name_of",
    "tables_of",
]

Hook: TypeAlias = Callable[..., Any]
Given: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_INFRASTRUCTURE = frozenset({"torch", "penstock"})
_CAPTURING = "transformers.utils.output_capturing"


class HereOnly:
    """A hook that is called only on the stage that has the layer."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, *given: Any) -> Any:
        """Call the hook."""
        return self.hook(*given)


def here_only(hook: Hook) -> HereOnly:
    """Mark a forward hook that only observes, so that only the stage with the layer calls it.

    Any other hook is called on all later stages too, with stand-ins for missing values, because
    the model may use what it collects.

    >>> layer = nn.Linear(2, 2)
    >>> handle = layer.register_forward_hook(here_only(lambda *_: print("ran")))
    """
    return HereOnly(hook)


def _unwrap(hook: Hook) -> Hook:
    while isinstance(hook, partial):
        hook = hook.func
    return hook


def name_of(hook: Hook) -> str:
    """Return the name of a hook."""
    function = _unwrap(hook)
    return str(getattr(function, "__qualname__", type(function).__name__))


def code_of(hook: Hook) -> object:
    """Return what is equal for two hooks that come from the same lines of code."""
    function = _unwrap(hook)
    return getattr(function, "__code__", function)


def is_foreign(hook: Hook) -> bool:
    """Return whether a hook is the user's or the model's, and not torch's or ours."""
    hook = _unwrap(hook)
    source = getattr(hook, "__module__", None) or type(hook).__module__
    return source.partition(".")[0] not in _INFRASTRUCTURE


def is_active(hook: Hook) -> bool:
    """Return whether a hook may do something now; those of `transformers` are often inactive."""
    if getattr(hook, "__module__", None) != _CAPTURING:
        return True
    collected = sys.modules[_CAPTURING]._active_collector.get()
    names = hook.__code__.co_freevars
    cells: tuple[Any, ...] = getattr(hook, "__closure__", None) or ()
    if "key" not in names:
        return True
    return collected is not None and cells[names.index("key")].cell_contents in collected


@dataclass(frozen=True, slots=True, eq=False)
class HookTables:
    """The tables of a module's forward hooks, to which hooks may be added at any time.

    A stage may keep the tables of modules that it does not have, because they hold no parameters.
    These `are_mirrored`, and only foreign hooks are called from them.
    """

    before: dict[int, Hook]
    before_with_kwargs: Mapping[int, bool]
    after: dict[int, Hook]
    after_with_kwargs: Mapping[int, bool]
    are_mirrored: bool = False

    def foreign(self) -> tuple[Hook, ...]:
        """Return the hooks that other stages call too."""
        return tuple(filter(is_foreign, (*self.before.values(), *self.after.values())))


# Hooks of all modules, as `register_module_forward_hook` makes them.
GLOBAL_TABLES = HookTables(
    global_forward_pre_hooks,
    {},
    global_forward_hooks,
    global_forward_hooks_with_kwargs,
)


class StageView(Protocol):
    """The decisions of a stage about hooks."""

    def hook_to_call(self, table: HookTables, number: int, hook: Hook) -> Hook | None:
        """Return the hook to call on this stage in place of a hook with this number, or None."""

    def only_observes(self, hook: Hook) -> bool:
        """Return whether the model cannot notice what a hook does."""


def tables_of(module: nn.Module, *, are_mirrored: bool = False) -> HookTables:
    """Return the tables of a module's forward hooks."""
    return HookTables(
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        are_mirrored,
    )


def keeping_hooks(module: nn.Module) -> dict[int, Any]:
    """Return a memo with which a deep copy shares a module's hooks, which may hold the model."""
    tables = [table for inner in module.modules() for table in _hook_state(inner)]
    return {id(table): table for table in tables}


def _hook_state(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
    )


def call_pre_hooks(
    module: nn.Module, path: str, tables: Sequence[HookTables], given: Given, stage: StageView
) -> Given:
    """Call the hooks before a module's forward, and return the arguments that result."""
    args, kwargs = given
    for table in tables:
        for hook, has_kwargs in _listed(table, table.before, table.before_with_kwargs, stage):
            result = _call(path, hook, module, (args, kwargs) if has_kwargs else (args,), stage)
            if result is not None and has_kwargs:
                args, kwargs = result
            elif result is not None:
                args = result if isinstance(result, tuple) else (result,)
    return args, kwargs


def call_hooks(
    module: nn.Module,
    path: str,
    tables: Sequence[HookTables],
    given: Given,
    output: Any,
    stage: StageView,
) -> Any:
    """Call the hooks after a module's forward, and return the output that results."""
    args, kwargs = given
    for table in tables:
        for hook, has_kwargs in _listed(table, table.after, table.after_with_kwargs, stage):
            call = (args, kwargs, output) if has_kwargs else (args, output)
            result = _call(path, hook, module, call, stage)
            output = output if result is None else result
    return output


def _listed(
    table: HookTables, hooks: dict[int, Hook], with_kwargs: Mapping[int, bool], stage: StageView
) -> Iterator[tuple[Hook, bool]]:
    for number, hook in tuple(hooks.items()):
        found = stage.hook_to_call(table, number, hook)
        if found is not None:
            yield found, number in with_kwargs


def _call(
    path: str, hook: Hook, module: nn.Module, given: tuple[Any, ...], stage: StageView
) -> Any:
    if stage.only_observes(hook):
        return _call_without_values(path, hook, module, given)
    try:
        return hook(module, *given)
    except ModelError as error:
        raise ModelError(
            f"the forward hook {name_of(hook)} of {path!r} cannot be called on a stage that does "
            f"not have the module: {error}; register a hook that only observes as "
            "penstock.here_only(hook)"
        ) from error


def _call_without_values(path: str, hook: Hook, module: nn.Module, given: tuple[Any, ...]) -> Any:
    """Call a hook that only observes without any values, and ignore it if it needs some.

    It has got the values on the stage that has the module. Counted twice, they would be wrong.
    """
    try:
        return hook(module, *tree_map_only(torch.Tensor, partial(_hide, path), given))
    except ModelError:
        return None


def _hide(path: str, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, StandIn):
        return tensor
    return stand_in(tensor.shape, tensor.dtype, tensor.device, path)
