"""Guards the state of a model that was split: on each rank, only a part of it is trained.

Its state is then that of a partly trained model. Reading it raises an error, by a hook that
`state_dict` calls first and that is part of a pickle of the model.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import PipelineError

__all__ = ["refuse_state", "unguarded"]


class _Refusal:
    """A hook before `state_dict` that raises with the reason that `explain` returns, if any."""

    def __init__(self, explain: Callable[[], str | None]) -> None:
        self._explain = explain

    def __call__(self, _module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        self._check()

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        self._check()
        return _make_nothing, ()

    def __deepcopy__(self, _memo: dict[int, Any]) -> "_Refusal":
        return self

    def _check(self) -> None:
        reason = self._explain()
        if reason is not None:
            raise PipelineError(reason)


def _make_nothing() -> _Refusal:
    """Return what a pickled model has in place of the hook."""
    return _Refusal(lambda: None)


def refuse_state(model: nn.Module, explain: Callable[[], str | None]) -> RemovableHandle:
    """Make `state_dict` and pickles of a model raise, as long as `explain` returns a reason."""
    # Stages are copies of the model, which share its hooks unless the table is copied.
    model._state_dict_pre_hooks = OrderedDict(model._state_dict_pre_hooks)
    handle: RemovableHandle = model.register_state_dict_pre_hook(_Refusal(explain))  # type: ignore[no-untyped-call]  # untyped upstream
    return handle


@contextmanager
def unguarded(model: nn.Module) -> Iterator[None]:
    """Allow reading the state of a model meanwhile, for example to split it again."""
    held = [
        (module._state_dict_pre_hooks, key, hook)
        for module in model.modules()
        for key, hook in module._state_dict_pre_hooks.items()
        if isinstance(hook, _Refusal)
    ]
    for hooks, key, _ in held:
        hooks.pop(key, None)
    try:
        yield
    finally:
        for hooks, key, hook in held:
            hooks[key] = hook
