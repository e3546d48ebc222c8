"""The model that stages were split from: on one of several ranks, only a part of it is trained.

Its own state is then that of a half-trained model. Whoever asks for it is refused, by a hook that
`state_dict` calls first and that a pickle of the model meets, too.
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
    """Called before a model's state is taken: raises what `explain` says, if that is anything."""

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
    """What a model that was pickled has in the place of a refusal."""
    return _Refusal(lambda: None)


def refuse_state(model: nn.Module, explain: Callable[[], str | None]) -> RemovableHandle:
    """Let `state_dict` and pickles of a model raise, as long as `explain` gives a reason."""
    # Stages begin as copies of the model, which have their hooks in common with it.
    model._state_dict_pre_hooks = OrderedDict(model._state_dict_pre_hooks)
    handle: RemovableHandle = model.register_state_dict_pre_hook(_Refusal(explain))  # type: ignore[no-untyped-call]  # untyped upstream
    return handle


@contextmanager
def unguarded(model: nn.Module) -> Iterator[None]:
    """Let the state of a model be looked at meanwhile, say to split it once more."""
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
