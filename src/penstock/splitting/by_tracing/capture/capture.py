"""Captures a whole model as one graph with `torch.export`, without running or changing it.

The graph's inputs are the tensors among the model's arguments, its outputs the leaves of what the
model returns. Parameters and buffers are `get_attr` nodes with the model's own names, one node for
each tensor however many names it has.
"""

import inspect
import logging
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from penstock.errors import ModelError
from penstock.modules.untouched import same_attributes, untouched
from penstock.splitting.by_tracing.capture.conversions import leave_out_conversions
from penstock.splitting.by_tracing.capture.entry import Entry, bind_arguments, flatten_arguments
from penstock.splitting.by_tracing.capture.failure import explain_failure, suggest_layers
from penstock.splitting.by_tracing.capture.known_values import KnownInput, KnownValues, Reads
from penstock.splitting.by_tracing.capture.own_backwards import refuse_own_backwards
from penstock.splitting.by_tracing.capture.regions import GradModeMarks
from penstock.splitting.by_tracing.capture.sizes import describe_inputs, find_rules
from penstock.splitting.by_tracing.capture.traced_graph import build_graph, user_inputs
from penstock.splitting.caches import find_configs, log_ignored_cache, refuse_cache, without_cache
from penstock.splitting.original import unguarded
from penstock.torch_private import notes_of_last_export, pytree, symbolic_shape_config

__all__ = ["Capture", "capture"]

# Loggers that describe at length what our error says in the user's own terms.
_VERBOSE = ("torch.fx.experimental.symbolic_shapes", "torch.export._trace")

# Whether sizes may vary, and whether nothing is assumed about those of 0 and 1; the best first.
_ATTEMPTS = ((True, True), (True, False), (False, False))


@dataclass(frozen=True, eq=False)
class Capture:
    """A traced model: its graph, how it is called, and the tree that it returns."""

    model: nn.Module
    module: fx.GraphModule
    entry: Entry
    output_spec: pytree.TreeSpec
    device: torch.device


class _Flat(nn.Module):
    """The model as a function from tensors to leaves."""

    def __init__(
        self,
        model: nn.Module,
        leaves: list[Any],
        known: Sequence[tuple[str, torch.Tensor | None]],
        spec: pytree.TreeSpec,
        report_output: Callable[[pytree.TreeSpec], object],
    ) -> None:
        super().__init__()
        self.model = model
        self.leaves = leaves
        self.known = known
        self.spec = spec
        self.report_output = report_output
        self.reads = Reads()

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        inputs = [
            KnownInput(traced, name, value)
            for traced, (name, value) in zip(tensors, self.known, strict=True)
            if value is not None
        ]
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        buffers = dict(self.model.named_buffers())
        with GradModeMarks(), KnownValues(inputs, self.reads):
            output = self.model(*args, **kwargs)
        _write_back(self.model, buffers)
        named, spec = pytree.tree_flatten_with_path(output)
        self.report_output(spec)
        for path, leaf in named:
            if not isinstance(leaf, torch.Tensor | torch.SymInt | int | float | str | None):
                raise ModelError(
                    f"the model returns a {type(leaf).__name__} at output{pytree.keystr(path)}, "
                    "which cannot be traced; return tensors in tuples, lists, dicts or "
                    "dataclasses that are registered with torch.utils._pytree"
                )
        leaves = [leaf for _, leaf in named]
        refuse_own_backwards(self.model, leaves)
        return leaves


def _write_back(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Replace the assignment of a buffer by a write to it, which a graph can express."""
    for name, old in before.items():
        path, _, attribute = name.rpartition(".")
        holder = model.get_submodule(path)
        new = holder._buffers[attribute]
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            found = "None" if new is None else f"{tuple(new.shape)} {new.dtype}"
            raise ModelError(
                f"the model replaces its buffer {name}, {tuple(old.shape)} {old.dtype}, by "
                f"{found}; keep its shape and dtype, or split the model by layers"
            )
        if new is not old:
            holder._buffers[attribute] = old
            if new.untyped_storage()._cdata != old.untyped_storage()._cdata:
                old.copy_(new.detach())


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, dynamic: bool
) -> Capture:
    """Trace a model; if `dynamic`, sizes of its inputs may vary where the model allows that."""
    signature = inspect.signature(model.forward)
    try:
        bound = bind_arguments(signature, args, kwargs)
    except TypeError as error:
        raise ModelError(f"the example does not fit forward{signature}: {error}") from error
    device = _device_of(model, (args, kwargs))
    named, spec = flatten_arguments(signature, bound.args, bound.kwargs)
    leaves = _make_distinct([value for _, value in named], device)
    output_specs: list[pytree.TreeSpec] = []
    flat = _Flat(model, leaves, _readable_values(named), spec, output_specs.append)
    configs = find_configs(model)
    refuse_cache(configs, kwargs)
    log_ignored_cache(model)
    with ExitStack() as stack:
        for context in (
            untouched([model]),
            same_attributes(model),
            unguarded(model),
            without_cache(configs),
            _own_modes(),
            _quiet(),
        ):
            stack.enter_context(context)
        leave_out_conversions(model)
        stack.callback(notes_of_last_export.clear)
        program, is_oblivious = _export(flat, dynamic=dynamic)
    tensors = user_inputs(program)
    inputs = describe_inputs(
        [(name, leaf) for (name, _), leaf in zip(named, leaves, strict=True)], tensors
    )
    rules = find_rules(tensors, is_oblivious=is_oblivious)
    return Capture(
        model,
        build_graph(model, program, (one.name for one in inputs if one.sizes is not None)),
        Entry(signature, spec, inputs, rules),
        output_specs[-1],
        device,
    )


def _readable_values(
    named: Sequence[tuple[str, Any]],
) -> list[tuple[str, torch.Tensor | None]]:
    """Return each tensor's name and, where it is of integers, its values."""
    return [
        (name, None if x.is_floating_point() or x.is_complex() or x.is_meta else x)
        for name, x in named
        if isinstance(x, torch.Tensor)
    ]


def _device_of(model: nn.Module, example: Any) -> torch.device:
    """Return the device of a model's first tensor, or of its example."""
    for tensor in [*model.parameters(), *model.buffers(), *pytree.tree_leaves(example)]:
        if isinstance(tensor, torch.Tensor):
            return tensor.device
    return torch.device("cpu")


def _make_distinct(leaves: list[Any], device: torch.device) -> list[Any]:
    """Copy tensors that are given twice, because the graph could not distinguish their uses."""
    seen: set[int] = set()
    result = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if device.type == "meta":
                leaf = leaf.to(device)
            if id(leaf) in seen:
                leaf = leaf.detach().clone()
            seen.add(id(leaf))
        result.append(leaf)
    return result


def _export(flat: _Flat, *, dynamic: bool) -> tuple[ExportedProgram, bool]:
    """Trace, and return also whether nothing was assumed about sizes of 0 and 1.

    Tracing without that assumption is stricter about broadcasting. If it fails, the assumption is
    made, and if that fails too, the sizes are those of the example. Where the model reads values
    of its inputs, it is traced for those of the example.
    """
    failure: Exception | None = None
    for reads_inputs, (is_dynamic, is_oblivious) in product((False, True), _ATTEMPTS):
        if (reads_inputs and not flat.reads.has_missed) or (is_dynamic and not dynamic):
            continue
        flat.reads.are_answered = reads_inputs
        try:
            program = _export_once(flat, is_dynamic=is_dynamic, is_oblivious=is_oblivious)
            return program, is_oblivious or not is_dynamic
        except ModelError:
            raise
        except Exception as error:  # whatever the model or torch raises
            failure = error
    assert failure is not None, "there is at least one attempt"
    raise ModelError(explain_failure(flat.model, failure)) from failure


def _export_once(flat: _Flat, *, is_dynamic: bool, is_oblivious: bool) -> ExportedProgram:
    tensors = tuple(leaf for leaf in flat.leaves if isinstance(leaf, torch.Tensor))
    shapes = tuple(_free_sizes(tensor) if is_dynamic else None for tensor in tensors)
    with (
        _refusing_other_draws(flat.model),
        symbolic_shape_config.patch(  # type: ignore[attr-defined]  # made on import
            backed_size_oblivious=is_oblivious
        ),
    ):
        return torch.export.export(flat, tensors, dynamic_shapes=(shapes,), strict=False)


@contextmanager
def _refusing_other_draws(model: nn.Module) -> Iterator[None]:
    """Raise if random numbers are drawn that would be the same in every run of the graph."""
    before = _other_random_states()
    yield
    if _other_random_states() != before:
        raise ModelError(
            "a model that is traced must draw its random numbers with torch (it draws some with "
            "Python's random or with NumPy, which would be the same in every step); "
            f"switch off what draws them, or {suggest_layers(model)}"
        )


def _other_random_states() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _free_sizes(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(Dim.AUTO if size > 1 else None for size in tensor.shape)


@contextmanager
def _own_modes() -> Iterator[None]:
    """Trace with gradients and without autocast, whatever the caller has switched on."""
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what export logs and prints about a model that it cannot trace."""
    loggers = [logging.getLogger(name) for name in _VERBOSE]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        for logger, is_disabled in zip(loggers, before, strict=True):
            logger.disabled = is_disabled
