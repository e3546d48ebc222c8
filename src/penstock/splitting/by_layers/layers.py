"""Splits a model by its list of layers, without tracing: which stage gets what.

Every stage runs the model's own forward, with its own layers only; see `replay`. Modules before
the layers are on the first stage, modules after them on the last. What layers get besides the
output of the layer before (masks, rotary tables) is computed again on each stage from the model's
inputs, which is cheaper than sending it. What other layers return is sent.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import nn

from penstock.errors import ModelError, SizeError
from penstock.modules.compiled import is_compiler_wrapper
from penstock.splitting.by_layers.example.dependencies import find_dependencies
from penstock.splitting.by_layers.example.own_example import find_own_dependencies
from penstock.splitting.by_layers.example.value_tracker import Dependencies
from penstock.splitting.by_layers.records.call_records import INPUTS, Value
from penstock.splitting.by_layers.rerouting import LayerValues
from penstock.splitting.by_layers.routes import LayerRoutes
from penstock.splitting.by_layers.stage_builder import build_layer_stages
from penstock.splitting.by_layers.units import Units, find_units
from penstock.splitting.caches import log_ignored_cache
from penstock.splitting.pipe import Pipe, check_complete

__all__ = ["even_sizes", "split_layers"]


def even_sizes(layers: int, stages: int) -> list[int]:
    """Return how many layers each stage gets: as equal as possible, the larger ones first.

    >>> even_sizes(30, 4)
    [8, 8, 7, 7]
    """
    if not 1 <= stages <= layers:
        raise SizeError(
            f"stages must be 1 to {layers}, the number of layers (got {stages}); a stage needs one"
        )
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def split_layers(
    model: nn.Module,
    lists: Sequence[str],
    sizes: Sequence[int] | int,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Pipe:
    """Cut a model between the layers of these lists; `sizes` is how many each stage gets.

    With an example, given by `args` and `kwargs`, the model is run once to find what each stage
    needs. Without one, each stage is assumed to need the model's inputs and what the last layer of
    the stage before returns, unless the model has `dummy_inputs` that show more.
    """
    if is_compiler_wrapper(model):
        raise ModelError(
            "a model to split must not be compiled as a whole; split the model itself, and "
            "compile its layers (`layer.compile()`)"
        )
    units = find_units(model, lists)
    counts = even_sizes(len(units.layers), sizes) if isinstance(sizes, int) else list(sizes)
    if sum(counts) != len(units.layers) or min(counts) < 1:
        raise SizeError(
            f"the sizes of the stages must be at least 1 and add up to {len(units.layers)}, the "
            f"number of layers (got {counts}, sum {sum(counts)}); change stages"
        )
    log_ignored_cache(model)
    plain = _plan(units, counts)
    if args is None and kwargs is None:
        routes = _plan_by_own_example(model, lists, units, plain)
    else:
        dependencies = find_dependencies(model, units, args or (), kwargs or {})
        routes = _plan_by_dependencies(units, plain, dependencies)
    stages = build_layer_stages(model, units, routes)
    check_complete(model, stages)
    return Pipe(tuple(stages), routes.dataflow(), LayerValues(routes), tuple(lists))


def _plan(units: Units, counts: Sequence[int]) -> LayerRoutes:
    """Assign units to stages by the order in which the model registers them."""
    ends = list(accumulate(counts))
    stage_of_layer = [next(s for s, end in enumerate(ends) if n < end) for n in range(ends[-1])]
    stages = {
        unit.path: stage_of_layer[unit.layer if unit.layer is not None else max(unit.after - 1, 0)]
        for unit in units.units
    }
    repeated = {
        (unit.path, call): stage_of_layer[units.layers.index(path)]
        for unit in units.units
        if len(unit.paths) > 1 and unit.layer is not None
        for call, path in enumerate(unit.paths)
    }
    last_layers = frozenset(
        unit.path for unit in units.units if {units.layers[e - 1] for e in ends} & set(unit.paths)
    )
    return LayerRoutes(len(counts), stages, last_layers, repeated)


def _plan_by_own_example(
    model: nn.Module, lists: Sequence[str], units: Units, plain: LayerRoutes
) -> LayerRoutes:
    """Return the plain plan, or what the model's own examples show to be needed beyond it.

    Of several that need more, that with most calls counts: pictures and words before words alone.
    What a batch then lacks is not sent.
    """
    needing: dict[int, LayerRoutes] = {}
    refused: list[ModelError] = []
    has_run = is_planned = False
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for dependencies in find_own_dependencies(model, lists):
        has_run = True
        # In the plain plan all stages get all inputs.
        everywhere = replace(dependencies, decisions=dependencies.decisions | dependencies.inputs)
        try:
            routes = _plan_by_dependencies(units, plain, dependencies)
            needed = _plan_by_dependencies(units, plain, everywhere)
        except ModelError as error:
            refused.append(error)
            continue
        is_planned = True
        if not _is_enough(plain, needed, parameters):
            needing.setdefault(len(dependencies.calls), routes)
    if not has_run:
        _require_no_lists_beside(model, units)
    if refused and not is_planned:
        raise refused[0]
    return needing[max(needing)] if needing else plain


def _require_no_lists_beside(model: nn.Module, units: Units) -> None:
    """Raise if other lists have a module for each layer, or for each but one: norms, scores.

    Such modules may run between the layers, which the plain plan takes for after all of them.
    """
    parents = {layer.rpartition(".")[0] for layer in units.layers}
    lengths = {len(model.get_submodule(path)._modules) for path in parents}
    beside = []
    for path in units.containers:
        module = model.get_submodule(path)
        count = len(module._modules) if isinstance(module, nn.ModuleList | nn.ModuleDict) else 0
        is_around = any(f"{parent}.".startswith(f"{path}.") for parent in parents)
        if count > 1 and not is_around and {count, count + 1} & lengths:
            beside.append(path)
    if beside:
        raise ModelError(
            f"the model has other lists with as many modules as layers ("
            f"{', '.join(map(repr, beside))}), and only an example shows whether they run between "
            "the layers; give one (layers='auto', example_kwargs={...})"
        )


def _is_enough(plain: LayerRoutes, routes: LayerRoutes, parameters: Collection[str]) -> bool:
    """Return whether stages get all that they need by what is assumed without an example."""
    for (path, call), stage in routes.stage_of_call.items():
        if path not in plain.stage_of_path or plain.stage(path, call) != stage:
            return False
    for value, stages in routes.needed_by.items():
        later = {stage for stage in stages if stage > routes.origin(value)}
        is_near = value.path in plain.last_layers and later <= {routes.origin(value) + 1}
        if later and value.path != INPUTS and not is_near:
            return False
    return all(held <= {0} for name, held in routes.holders.items() if name in parameters)


def _plan_by_dependencies(
    units: Units, plain: LayerRoutes, dependencies: Dependencies
) -> LayerRoutes:
    """Assign units to stages so that every value is computed before it is needed, and route it."""
    stages = _stages_of_calls(units, plain, dependencies)
    stages.update((inner, stages[call]) for inner, call in dependencies.hook_calls.items())
    _require_one_stage(stages, dependencies)
    needed_by = _find_needed_by(plain.num_stages, stages, dependencies)
    holders = {v.path: frozenset(s) for v, s in needed_by.items() if not _is_sent(v, stages)}
    written = {name: holders.get(name, frozenset()) for name in dependencies.written}
    for name, values in dependencies.written.items():
        holders[name] = frozenset([max(_origin(value, stages) for value in values)])
    sent = {v: tuple(sorted(s)) for v, s in needed_by.items() if _is_sent(v, stages)}
    return LayerRoutes(
        plain.num_stages,
        _stages_of_paths(units, plain, stages, holders),
        plain.last_layers,
        stages,
        sent,
        holders,
        written,
        dependencies.example_form,
        dependencies.rewritten,
        dependencies.constants,
        dependencies.changed,
    )


def _require_one_stage(stages: Mapping[tuple[str, int], int], dependencies: Dependencies) -> None:
    """Raise if units that share more than what they return are on several stages."""
    for first, second in sorted(dependencies.inner_uses):
        places = {stage for (path, _), stage in stages.items() if path in (first, second)}
        if len(places) > 1:
            raise ModelError(
                f"{first!r} and {second!r} must be on one stage (got stages {sorted(places)}), "
                f"because {second!r} uses a value that was made in {first!r}, but not returned "
                "by it; return it, or change the sizes of the stages"
            )


def _find_needed_by(
    num_stages: int, stages: Mapping[tuple[str, int], int], dependencies: Dependencies
) -> dict[Value, set[int]]:
    """Return the stages that need each value; none for an input that was not used."""
    needed_by: dict[Value, set[int]] = {value: set() for value in dependencies.inputs}
    uses = [(stages[call.path, call.number], call.uses) for call in dependencies.calls]
    everywhere = dependencies.decisions | dependencies.counts
    deciding = [(stage, everywhere) for stage in range(num_stages)]
    for stage, values in [*uses, (num_stages - 1, dependencies.output), *deciding]:
        for value in values:
            needed_by.setdefault(value, set()).add(stage)
    _add_merged(num_stages, stages, dependencies, needed_by)
    return needed_by


def _add_merged(
    num_stages: int,
    stages: Mapping[tuple[str, int], int],
    dependencies: Dependencies,
    needed_by: dict[Value, set[int]],
) -> None:
    """Add what is written to tensors that a stage can make: it would not know the rest of them."""

    def has_all(stage: int, values: frozenset[Value]) -> bool:
        return all(_origin(v, stages) == stage or stage in needed_by.get(v, ()) for v in values)

    is_complete = False
    while not is_complete:
        is_complete = True
        for written, target, calls in dependencies.merged:
            last = [stages[call.path, call.number] for call in dependencies.calls[:calls][-1:]]
            for stage in range(max(last, default=0), num_stages):
                if has_all(stage, target) and not has_all(stage, written):
                    is_complete = False
                    for value in written:
                        needed_by.setdefault(value, set()).add(stage)


def _stages_of_paths(
    units: Units,
    plain: LayerRoutes,
    stages: Mapping[tuple[str, int], int],
    holders: Mapping[str, frozenset[int]],
) -> dict[str, int]:
    """Return the stage of each unit; one that is never called is where its parameters are used."""
    paths = dict(plain.stage_of_path)
    for unit in units.units:
        used = [
            s for n, stages in holders.items() if n.startswith(f"{unit.path}.") for s in stages
        ]
        calls = [stage for (path, _), stage in stages.items() if path == unit.path]
        if calls or used:
            paths[unit.path] = calls[0] if calls else min(used)
    return paths


def _is_sent(value: Value, stages: Mapping[tuple[str, int], int]) -> bool:
    """Return whether a value is sent between stages, and not a parameter that stages hold."""
    return value.path == INPUTS or (value.path, value.call) in stages


def _origin(value: Value, stages: Mapping[tuple[str, int], int]) -> int:
    return stages.get((value.path, value.call), 0)


def _stages_of_calls(
    units: Units, plain: LayerRoutes, dependencies: Dependencies
) -> dict[tuple[str, int], int]:
    """Return the stage of every call, never before that of a call whose values it uses.

    Calls are assigned in the order in which they happen, so that each stage runs a contiguous
    part of the model's forward. Other units go where they are registered, if possible.
    """
    layers = {unit.path for unit in units.units if unit.layer is not None}
    latest: list[int] = []
    limit = plain.num_stages - 1
    for call in reversed(dependencies.calls):
        if call.path in layers:
            limit = min(limit, plain.stage(call.path, call.number))
        latest.append(limit)
    stages: dict[tuple[str, int], int] = {}
    reached = 0
    for call, limit in zip(dependencies.calls, reversed(latest), strict=True):
        wish = plain.stage(call.path, call.number)
        if call.path in layers and not reached <= wish <= limit:
            raise ModelError(
                f"layers must run in the order of their lists (got {call.path!r} out of order); "
                "give several lists in the order in which they run, or split the model by tracing"
            )
        reached = min(max(wish, reached), limit)
        stages[call.path, call.number] = reached
    return stages
