"""Every family at every size of the playground, as columns of small integers.

The order of a rank is a list of tokens, one per action: its kind, whether it runs together with
the action before it, and which of the rank's stages it is on. Microbatches mostly follow one
another, so that only the difference to the next one of that kind and stage is stored.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SizeError
from penstock.ir.actions import COMPUTE_KINDS
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.schedules.formulae import FORMULAE, At, Formula
from penstock.schedules.registry import FAMILIES, Family
from penstock.view.html.columns import encode_columns

__all__ = ["MICROBATCHES", "RANKS", "STAGES_PER_RANK", "catalogue", "choices_of"]

RANKS = tuple(range(1, 9))
MICROBATCHES = (*range(1, 17), 20, 24, 28, 32)
STAGES_PER_RANK = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class _Orders:
    """The orders of some schedules as columns, rank after rank."""

    length: list[int]
    token: list[NDArray[np.int64]]
    skip: list[NDArray[np.int64]]


def catalogue(families: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Return the data of every family, or of some, as JSON values for the page."""
    # Training first: evaluation is another matter.
    trained = [name for name in FORMULAE if name != "ForwardOnly"]
    names = [*trained, "ForwardOnly"] if families is None else families
    return [_family_data(FAMILIES[name]) for name in names]


def choices_of(family: Family) -> tuple[int, ...]:
    """Return the numbers of stages per rank that a family can have."""
    return tuple(v for v in STAGES_PER_RANK if isinstance(_generate(family, 2, 2, v), Schedule))


def _generate(family: Family, ranks: int, microbatches: int, per_rank: int) -> Schedule | str:
    """Return a schedule, or the reason why this size is refused."""
    try:
        return family.generate(ranks, microbatches, per_rank)
    except SizeError as error:
        return str(error)


# Takes a second for all families, and is the same for every page.
@cache
def _family_data(family: Family) -> dict[str, object]:
    choices = choices_of(family)
    orders = _Orders([], [], [])
    layers: dict[str, object] = {}
    refused: dict[str, str] = {}
    for v, p, m in product(choices, RANKS, MICROBATCHES):
        schedule = _generate(family, p, m, v)
        if isinstance(schedule, str):
            refused[f"{v},{p},{m}"] = schedule
            continue
        if f"{v},{p}" not in layers:
            layers[f"{v},{p}"] = _layer(family, schedule, v)
        _append(orders, schedule)
    formulae = FORMULAE[family.name]
    return {
        "name": family.name,
        "summary": family.summary,
        "choices": choices,
        "stages_per_rank": family.stages_per_rank,
        "bubble": _formula_text(formulae.bubble),
        "memory": _formula_text(formulae.memory),
        "layers": layers,
        "refused": refused,
        "columns": encode_columns(
            {
                "length": np.array(orders.length),
                "token": np.concatenate(orders.token),
                "skip": np.concatenate(orders.skip),
            }
        ),
    }


def _formula_text(formula: Formula) -> dict[str, object]:
    fields = asdict(formula)
    del fields["value"]
    return fields


def _layer(family: Family, schedule: Schedule, v: int) -> dict[str, object]:
    """Return what all schedules with these ranks and stages share.

    The page evaluates formulae without knowing them: the bubble is linear in the seconds of F, I,
    W and an overlapped pair, and the memory in the microbatches.
    """
    parts, p = schedule.dataflow.parts, schedule.num_ranks
    # The page reads the edges off the parts.
    edges = [(s, s + 1) for s in range(len(parts) - 1) if parts[s + 1] == parts[s] + 1]
    assert schedule.dataflow == Dataflow(len(parts), edges, parts)
    formulae = FORMULAE[family.name]
    units = np.eye(4).tolist()
    none = formulae.memory.value(At(p, 0, v))
    return {
        "rank_of_stage": schedule.placement.rank_of_stage,
        "parts": parts,
        "bubble": [formulae.bubble.value(At(p, 0, v, *unit)) for unit in units],
        "memory": [none, formulae.memory.value(At(p, 1, v)) - none],
    }


def _append(orders: _Orders, schedule: Schedule) -> None:
    rows, stages = schedule.rows, schedule.num_stages
    local = np.zeros(stages, dtype=np.int64)
    for rank in range(schedule.num_ranks):
        held = schedule.placement.stages(rank)
        local[list(held)] = range(len(held))
    token = rows.kind | (rows.joined << 2) | (local[rows.stage] << 3)
    orders.length.extend(np.diff(rows.first).tolist())
    orders.token.append(token.astype(np.int64))
    # Actions of one kind and stage, in the order of their rank's list.
    key = rows.stage.astype(np.int64) * len(COMPUTE_KINDS) + rows.kind
    by_key = np.argsort(key, kind="stable")
    microbatch = rows.microbatch[by_key].astype(np.int64)
    skip = np.diff(microbatch, prepend=0) - 1
    begins = np.flatnonzero(np.diff(key[by_key], prepend=-1))
    skip[begins] = microbatch[begins]
    in_order = np.empty(len(rows), dtype=np.int64)
    in_order[by_key] = skip
    orders.skip.append(in_order)
