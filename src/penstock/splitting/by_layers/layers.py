"""Splits a model by its list of layers, without tracing.

Every stage runs the model's own forward, with its own layers only; see `replay`. What stands
before the layers is on the first stage and what stands after them on the last. What layers get
besides the running value (masks, rotary tables) is computed again on each stage from the model's
inputs, which is cheaper than sending it; what comes out of other layers is sent.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from penstock.errors import ModelError, SizeError
from penstock.modules.compiled import is_compiler_wrapper
from penstock.splitting.by_layers.example.dependencies import Dependencies, find_needs
from penstock.splitting.by_layers.layer_stage import build_layer_stages
from penstock.splitting.by_layers.notes import INPUTS, Value
from penstock.splitting.by_layers.routes import LayerRoutes
from penstock.splitting.by_layers.units import Units, find_units
from penstock.splitting.caches import tell_of_cache
from penstock.splitting.pipe import Pipe, check_complete

__all__ = ["even_sizes", "split_layers"]


def even_sizes(layers: int, stages: int) -> list[int]:
    """How many layers each stage gets: as nearly equal as can be, the larger ones first.

    >>> even_sizes(30, 4)
    [8, 8, 7, 7]
    """
    if not 1 <= stages <= layers:
        raise SizeError(
            f"{layers} layers make 1 to {layers} stages, since each needs one (stages: {stages})"
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

    With an example, given by `args` and `kwargs`, the model is run once to see what each stage
    needs; without, each stage is taken to need the model's inputs and what the last layer of the
    stage before returns.
    """
    if is_compiler_wrapper(model):
        raise ModelError(
            "the model is compiled as a whole; split the model itself, and compile its layers "
            "(`layer.compile()`)"
        )
    units = find_units(model, lists)
    counts = even_sizes(len(units.layers), sizes) if isinstance(sizes, int) else list(sizes)
    if sum(counts) != len(units.layers) or min(counts) < 1:
        raise SizeError(
            f"the sizes of the stages {counts} add up to {sum(counts)}, but there are "
            f"{len(units.layers)} layers and every stage needs one"
        )
    tell_of_cache(model)
    plain = _plan(units, counts)
    if args is None and kwargs is None:
        itinerary = plain
    else:
        needs = find_needs(model, units, args or (), kwargs or {})
        itinerary = _plan_by_needs(units, plain, needs)
    stages = build_layer_stages(model, units, itinerary)
    check_complete(model, stages)
    return Pipe(tuple(stages), itinerary.dataflow())


def _plan(units: Units, counts: Sequence[int]) -> LayerRoutes:
    """Where units go by the order in which the model registers them."""
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


def _plan_by_needs(units: Units, plain: LayerRoutes, needs: Dependencies) -> LayerRoutes:
    """Where units go so that every value is made before it is needed, and where values go."""
    stages = _stages_of_calls(units, plain, needs)
    stages.update((side, stages[call]) for side, call in needs.sides.items())
    _require_bonds(stages, needs)
    wanted = _wanted(plain.num_stages, stages, needs)
    loose = {v.path: frozenset(s) for v, s in wanted.items() if not _is_sent(v, stages)}
    written = {name: loose.get(name, frozenset()) for name in needs.written}
    for name, values in needs.written.items():
        loose[name] = frozenset([max(_origin(value, stages) for value in values)])
    sent = {v: tuple(sorted(s)) for v, s in wanted.items() if _is_sent(v, stages)}
    return LayerRoutes(
        plain.num_stages,
        _stages_of_paths(units, plain, stages, loose),
        plain.last_layers,
        stages,
        sent,
        loose,
        written,
        needs.outlines,
        needs.rewritten,
        needs.constants,
        needs.changed,
    )


def _require_bonds(stages: Mapping[tuple[str, int], int], needs: Dependencies) -> None:
    """Units that share more than what they return have to be on one stage."""
    for first, second in sorted(needs.bonds):
        places = {stage for (path, _), stage in stages.items() if path in (first, second)}
        if len(places) > 1:
            raise ModelError(
                f"{second!r} uses a value that was made in {first!r}, but not returned by it; "
                f"other stages know only what a module returns, so both have to be on one stage "
                f"(stages: {sorted(places)})"
            )


def _wanted(
    num_stages: int, stages: Mapping[tuple[str, int], int], needs: Dependencies
) -> dict[Value, set[int]]:
    """The stages that need each value; none, for an input that nobody has used."""
    wanted: dict[Value, set[int]] = {value: set() for value in needs.inputs}
    uses = [(stages[call.path, call.number], call.uses) for call in needs.calls]
    deciding = [(stage, needs.decisions) for stage in range(num_stages)]
    for stage, values in [*uses, (num_stages - 1, needs.output), *deciding]:
        for value in values:
            wanted.setdefault(value, set()).add(stage)
    return wanted


def _stages_of_paths(
    units: Units,
    plain: LayerRoutes,
    stages: Mapping[tuple[str, int], int],
    loose: Mapping[str, frozenset[int]],
) -> dict[str, int]:
    """The stage of each unit; one that is never called goes where its parameters are used."""
    paths = dict(plain.stage_of_path)
    for unit in units.units:
        used = [s for n, stages in loose.items() if n.startswith(f"{unit.path}.") for s in stages]
        calls = [stage for (path, _), stage in stages.items() if path == unit.path]
        if calls or used:
            paths[unit.path] = calls[0] if calls else min(used)
    return paths


def _is_sent(value: Value, stages: Mapping[tuple[str, int], int]) -> bool:
    """Whether a value goes between stages; a parameter beside the layers is held instead."""
    return value.path == INPUTS or (value.path, value.call) in stages


def _origin(value: Value, stages: Mapping[tuple[str, int], int]) -> int:
    return stages.get((value.path, value.call), 0)


def _stages_of_calls(
    units: Units, plain: LayerRoutes, needs: Dependencies
) -> dict[tuple[str, int], int]:
    """The stage of every call: never before that of a call whose values it uses.

    Calls are dealt out in the order in which they happen, so that each stage runs a stretch of
    the model's forward; a unit that is no layer goes where the plain plan has it, if it can.
    """
    layers = {unit.path for unit in units.units if unit.layer is not None}
    latest: list[int] = []
    limit = plain.num_stages - 1
    for call in reversed(needs.calls):
        if call.path in layers:
            limit = min(limit, plain.stage(call.path, call.number))
        latest.append(limit)
    stages: dict[tuple[str, int], int] = {}
    reached = 0
    for call, limit in zip(needs.calls, reversed(latest), strict=True):
        wish = plain.stage(call.path, call.number)
        if call.path in layers and not reached <= wish <= limit:
            raise ModelError(
                f"{call.path!r} is called out of the order of the list; only layers that run one "
                "after the other can be split by layers"
            )
        reached = min(max(wish, reached), limit)
        stages[call.path, call.number] = reached
    return stages
