"""Regions: parts of a traced graph that run without gradients or under autocast.

`torch.export` makes a nested graph of each region. Here its nodes are moved back into the one
graph and each node has its regions as metadata, so that a cut may go through a region. Marks in
the graph say where gradients are switched, because export loses that inside of autocast. A stage's
graph opens and closes regions:

    open_grad_mode(_regions, False)
    mul = torch.ops.aten.mul.Tensor(x, 2)
    close_region(_regions)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from penstock.torch_private import set_grad_enabled

__all__ = [
    "OPEN_REGIONS",
    "Autocast",
    "GradMode",
    "GradModeMarks",
    "OpenRegions",
    "Region",
    "change_regions",
    "close_region",
    "inline_regions",
    "open_autocast",
    "open_grad_mode",
    "regions_of",
]


class GradMode(NamedTuple):
    """A region that runs with gradients switched on or off."""

    is_enabled: bool


class Autocast(NamedTuple):
    """A region that runs under autocast, or with autocast switched off."""

    device_type: str
    dtype: torch.dtype | None
    is_enabled: bool
    caches: bool | None


Region: TypeAlias = GradMode | Autocast
OpenRegions: TypeAlias = list[AbstractContextManager[Any]]

# The name of the input of a graph that holds the open regions.
OPEN_REGIONS = "_regions"
_KEY = "regions"
# The number of arguments of the nested call that describe the region; the nested graph follows.
_REGIONS = {"wrap_with_set_grad_enabled": (None, 1), "wrap_with_autocast": (Autocast, 4)}

torch.library.define("penstock::note_grad_mode", "(bool is_enabled) -> ()")


@torch.library.impl("penstock::note_grad_mode", "BackendSelect")
def _do_nothing(is_enabled: bool) -> None:  # noqa: ARG001  # the operation's form
    return None


torch.library.register_fake("penstock::note_grad_mode", _do_nothing)
_GRAD_MODE_MARK = torch.ops.penstock.note_grad_mode.default
fx.node.has_side_effect(_GRAD_MODE_MARK)


def regions_of(node: fx.Node) -> tuple[Region, ...]:
    """Return the regions that a node runs in, from the outermost."""
    found: tuple[Region, ...] = node.meta.get(_KEY, ())
    return found


class GradModeMarks(TorchFunctionMode):
    """Marks where gradients are switched on and off in a graph that is being traced."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # torch's form
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called in place of every function of torch."""
        if func is set_grad_enabled:
            _GRAD_MODE_MARK(bool(args[0]))
        return func(*args, **(kwargs or {}))


def inline_regions(module: fx.GraphModule) -> None:
    """Replace the nested graphs of regions by their nodes, and marks by regions."""
    _inline_all(module)
    is_enabled = True
    for node in list(module.graph.nodes):
        if node.target is _GRAD_MODE_MARK:
            is_enabled = node.args[0]
            module.graph.erase_node(node)
        elif not is_enabled:
            node.meta[_KEY] = (GradMode(False), *regions_of(node))


def _inline_all(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        kind = _REGIONS.get(getattr(node.target, "__name__", ""))
        if node.op == "call_function" and kind is not None:
            region, size = kind
            nested = node.args[size]
            inner = module.get_submodule(str(nested.target))
            assert isinstance(inner, fx.GraphModule)
            _inline_all(inner)
            regions = () if region is None else (region(*node.args[:size]),)
            _inline(node, inner.graph, regions, node.args[size + 1 :])
            module.graph.erase_node(node)
            if not nested.users:
                module.graph.erase_node(nested)


def _inline(
    node: fx.Node, inner: fx.Graph, regions: tuple[Region, ...], inputs: tuple[Any, ...]
) -> None:
    placeholders = [n for n in inner.nodes if n.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    with node.graph.inserting_before(node):
        for old in inner.nodes:
            if old.op not in ("placeholder", "output"):
                new = node.graph.node_copy(old, values.__getitem__)
                new.meta[_KEY] = (*regions_of(node), *regions, *regions_of(old))
                values[old] = new
    results = fx.map_arg(inner.output_node().args[0], values.__getitem__)
    for user in list(node.users):
        assert isinstance(results, tuple | list)
        assert isinstance(user.args[1], int)
        user.replace_all_uses_with(results[user.args[1]])
        node.graph.erase_node(user)


def change_regions(
    old: tuple[Region, ...], new: tuple[Region, ...]
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the calls, as function and arguments, that lead from open regions to others."""
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    for _ in old[same:]:
        yield close_region, ()
    for region in new[same:]:
        match region:
            case GradMode():
                yield open_grad_mode, tuple(region)
            case Autocast():
                yield open_autocast, tuple(region)


def open_grad_mode(regions: OpenRegions, is_enabled: bool) -> None:
    """Begin a region that runs with gradients switched on or off."""
    _open(regions, torch.enable_grad() if is_enabled else torch.no_grad())


def open_autocast(
    regions: OpenRegions,
    device_type: str,
    dtype: torch.dtype | None,
    is_enabled: bool,
    caches: bool | None,
) -> None:
    """Begin a region that runs under autocast, or with autocast switched off."""
    _open(regions, torch.autocast(device_type, dtype, is_enabled, caches))


def close_region(regions: OpenRegions) -> None:
    """End the region that was begun last."""
    regions.pop().__exit__(None, None, None)


def _open(regions: OpenRegions, context: AbstractContextManager[Any]) -> None:
    context.__enter__()
    regions.append(context)


for _function in (open_grad_mode, open_autocast, close_region):
    fx.node.has_side_effect(_function)
