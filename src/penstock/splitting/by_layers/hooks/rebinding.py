"""Hooks of a stage, rebound so that they refer to the stage's copy of the model."""

from collections.abc import Iterable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from penstock.splitting.by_layers.hooks.hooks import Hook, HookTables, is_foreign
from penstock.splitting.by_layers.hooks.observers import only_observes

__all__ = ["StageHooks", "rebind"]

# How deep to follow functions that functions refer to.
_DEPTH = 3


class StageHooks:
    """The hooks that one stage calls, of its own modules and of others.

    `copies` has the stage's copy of each container of the model. `local` has the numbers of hooks
    that were registered while a stage ran, because every stage registers its own.
    """

    def __init__(self, local: set[int] | None = None) -> None:
        # Weak, so that stages do not keep the model alive.
        self.copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        self.local: set[int] = set() if local is None else local
        # The modules of the stage, copies and remote modules among them.
        self.modules: tuple[nn.Module, ...] = ()
        self.are_needed = False
        self._observers: dict[int, tuple[Hook, bool]] = {}
        self._rebound: dict[int, tuple[Hook, Hook]] = {}
        self._installed: list[tuple[dict[int, Hook], int, Hook, Hook]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy; with copies of modules only if hooks refer to them."""
        copies = list(self.copies.items()) if self.are_needed else []
        kept = {name: vars(self)[name] for name in ("local", "are_needed", "modules")}
        return {"copies": copies, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["local"])  # type: ignore[misc]  # built again by the constructor
        self.are_needed, self.modules = state["are_needed"], state["modules"]
        self.copies.update(state["copies"])

    def hook_to_call(self, table: HookTables, number: int, hook: Hook) -> Hook | None:
        """Return the hook to call where its module is not, or None."""
        if table.are_mirrored and (number in self.local or not is_foreign(hook)):
            return None
        return self.rebound(hook)

    def only_observes(self, hook: Hook) -> bool:
        """Return whether the model cannot notice what a hook does."""
        known = self._observers.get(id(hook))
        if known is None or known[0] is not hook:
            answer = is_foreign(hook) and only_observes(hook, self.modules)
            known = self._observers[id(hook)] = hook, answer
        return known[1]

    def rebound(self, hook: Hook) -> Hook:
        """Return a hook that refers to this stage's copies."""
        known = self._rebound.get(id(hook))
        if known is None or known[0] is not hook:
            known = self._rebound[id(hook)] = hook, rebind(hook, self.copies)
            self.are_needed |= known[1] is not hook
        return known[1]

    def rebind_all(self, tables: Iterable[HookTables]) -> None:
        """Find the hooks that refer to the model that this stage has a copy of."""
        for table in tables:
            for hook in (*table.before.values(), *table.after.values()):
                self.rebound(hook)

    def install(self, tables: Iterable[HookTables]) -> None:
        """Replace such hooks in this stage's modules, until the end of the run."""
        for table in tables:
            for hooks in (table.before, table.after):
                for number, hook in tuple(hooks.items()):
                    found = self.rebound(hook)
                    if found is not hook:
                        hooks[number] = found
                        self._installed.append((hooks, number, hook, found))

    def restore(self) -> None:
        """Undo `install`."""
        for hooks, number, hook, found in self._installed:
            if hooks.get(number) is found:
                hooks[number] = hook
        self._installed.clear()


def rebind(value: Any, copies: Mapping[nn.Module, nn.Module], depth: int = _DEPTH) -> Any:
    """Return a function that refers to copies of modules in place of the modules.

    Models register their own methods and closures; on a stage, `self` is the stage's copy.
    """
    match value:
        case nn.Module():
            return copies.get(value, value)
        case MethodType():
            owner = rebind(value.__self__, copies, depth)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        case partial():
            given = [rebind(item, copies, depth) for item in (value.func, *value.args)]
            is_same = all(map(_is, given, (value.func, *value.args)))
            return value if is_same else partial(given[0], *given[1:], **value.keywords)
        case FunctionType() if depth and (value.__closure__ or value.__defaults__):
            return _rebind_function(value, copies, depth - 1)
        case _:
            return value


def _rebind_function(
    function: FunctionType, copies: Mapping[nn.Module, nn.Module], depth: int
) -> FunctionType:
    cells, defaults = function.__closure__ or (), function.__defaults__ or ()
    new_cells = tuple(_rebind_cell(cell, copies, depth) for cell in cells)
    new_defaults = tuple(rebind(default, copies, depth) for default in defaults)
    if all(map(_is, (*new_cells, *new_defaults), (*cells, *defaults))):
        return function
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, new_defaults, new_cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made


def _rebind_cell(cell: CellType, copies: Mapping[nn.Module, nn.Module], depth: int) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # it is still empty
        return cell
    found = rebind(content, copies, depth)
    return cell if found is content else CellType(found)


def _is(one: object, other: object) -> bool:
    return one is other
