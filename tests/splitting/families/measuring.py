"""Splits a small model in every way, trains it, and compares each gradient with the unsplit model.

The unsplit model runs on the same microbatches, so that what it computes in float32 is rounded
alike. A column is "exact", "WRONG" with what differs, or the error that the user gets. What is
wrong in a model with batch norms is measured again with theirs in one memory layout, both unsplit
and split, since torch's own gradients are wrong in others.
"""

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import penstock as ps
from penstock.errors import PenstockError
from penstock.splitting.by_layers.towers import find_towers
from penstock.splitting.pipe import Pipe
from tests.splitting.checking import gradients, squares
from tests.splitting.families.batch_norms import batch_norms_in_one_layout
from tests.splitting.families.building import Built, build
from tests.splitting.families.inputs import ROWS, rows_of

__all__ = ["COLUMNS", "EXACT", "LATE", "REFUSED", "measure"]

EXACT = "exact"
# A trace fixes sizes and values that a batch as the example has, and microbatches have not.
ONE_MICROBATCH = "exact, with one microbatch as the example"
ONE_LAYOUT = "exact, with batch norms in one memory layout"
REFUSED, LATE = "refused at the split", "refused in the first step"
COLUMNS = ("with an example", "without", "traced in 2")
# Parts that a family computes in float32 are rounded otherwise in a traced graph.
_LIMITS = {torch.float64: 1e-7, torch.float32: 1e-5}


def measure(kind: str, columns: Collection[str] = COLUMNS) -> dict[str, Any]:
    """Return the class of a family and what became of it by these ways of splitting."""
    built = build(kind)
    if isinstance(built, str):
        return {"kind": kind, "not built": built}
    row = {
        "kind": kind,
        "class": type(built.model).__name__,
        "inputs": list(built.inputs),
        "mode": "training" if built.is_training else "evaluation",
        "type": str(next(built.model.parameters()).dtype).removeprefix("torch."),
    }
    try:
        lists = find_towers(built.model, 4)
    except PenstockError as error:
        return {**row, "no list": str(error)}
    row["lists"] = lists
    ways: dict[str, tuple[tuple[str, ...], Callable[[nn.Module], Pipe]]] = {
        COLUMNS[0]: (
            ("1F1B", "ZBV"),
            lambda m: ps.split(m, layers="auto", stages=4, example_kwargs=built.inputs),
        ),
        COLUMNS[1]: (("1F1B", "ZBV"), lambda m: ps.split(m, stages=4)),
        COLUMNS[2]: (("1F1B",), lambda m: ps.split(m, stages=2, example_kwargs=built.inputs)),
    }
    try:
        expected = _reference(built)
    except Exception as error:  # whatever the model itself raises
        return {"kind": kind, "not built": f"it does not train unsplit: {error}"[:200]}
    if not all(gradient.isfinite().all() for gradient in expected.values()):
        return {"kind": kind, "not built": "its gradients are not finite, unsplit"}
    if not expected:
        return {"kind": kind, "not built": "its gradients are zero"}
    for name in columns:
        schedules, split = ways[name]
        found = _try(built, split, schedules, expected)
        if found.startswith("WRONG") and _has_batch_norms(built.model):
            with batch_norms_in_one_layout():
                again = _try(built, split, schedules, _reference(built))
            found = ONE_LAYOUT if again == EXACT else found
        row[name] = found
    if str(row.get(COLUMNS[2], EXACT)).startswith((REFUSED, LATE)):
        one = rows_of(built.inputs, 0, built.shared)
        again = _try(
            built, lambda m: ps.split(m, stages=2, example_kwargs=one), ("1F1B",), expected
        )
        row[COLUMNS[2]] = ONE_MICROBATCH if again == EXACT else again
    return row


def _has_batch_norms(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _reference(built: Built) -> dict[str, torch.Tensor]:
    model = deepcopy(built.model)
    for row in range(ROWS):
        loss = squares(model(**rows_of(built.inputs, row, built.shared))) / 4
        torch.autograd.backward(loss)
    return gradients(model)


def _try(
    built: Built,
    split: Callable[[nn.Module], Pipe],
    schedules: tuple[str, ...],
    expected: Mapping[str, torch.Tensor],
) -> str:
    model = deepcopy(built.model)
    try:
        pipe = split(model)
    except PenstockError as error:
        return f"{REFUSED}: {error}"
    except Exception as error:  # to be counted as what no user should see
        return f"CRASH at the split: {type(error).__name__}: {error}"[:400]
    for schedule in schedules:
        try:
            found = _train(model, pipe, schedule, built)
        except PenstockError as error:
            what = LATE if _is_ours(error) else f"CRASH {schedule}"
            return f"{what}: {error}"[:400]
        except Exception as error:  # to be counted as what no user should see
            return f"CRASH {schedule}: {type(error).__name__}: {error}"[:400]
        difference = _compare(found, expected)
        if difference:
            return f"WRONG {schedule}: {difference}"
    return EXACT


def _is_ours(error: BaseException) -> bool:
    """Return whether an error is in our words, or says where one of ours was raised."""
    return error.__cause__ is None or isinstance(error.__cause__, PenstockError)


def _train(model: nn.Module, pipe: Pipe, schedule: str, built: Built) -> dict[str, torch.Tensor]:
    with ps.Pipeline(pipe, schedule, microbatches=4, loss=squares, reduction="mean") as pipeline:
        pipeline.step(**_in_microbatches(built), target=torch.zeros(ROWS))
    return gradients(model)


def _in_microbatches(built: Built) -> dict[str, Any]:
    """Return inputs for a step of 4 microbatches; patches of pictures are given one by one."""
    return {name: _in_rows(name, value, built.shared) for name, value in built.inputs.items()}


def _in_rows(name: str, value: Any, shared: Collection[str]) -> Any:
    if name in shared:
        return ps.Shared(value)
    if len(value) == ROWS:
        return value
    return ps.Ready([rows_of({name: value}, row)[name] for row in range(ROWS)])


def _compare(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
    if found.keys() != expected.keys():
        return f"gradients of other parameters: {sorted(found.keys() ^ expected.keys())[:3]}"
    limit = _LIMITS[next(iter(expected.values())).dtype]
    worst = max(
        (((found[n] - e).abs().max() / (1 + e.abs().max())).item(), n) for n, e in expected.items()
    )
    return f"{worst[1]} by {worst[0]:.1e}" if not worst[0] <= limit else ""
