"""Splits a small model in every way, trains it, and compares each gradient with the unsplit model.

The unsplit model runs on the same microbatches, so that what it computes in float32 is rounded
alike. A column is "exact", "WRONG" with what differs, or the error that the user gets.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.errors import PenstockError
from penstock.splitting.by_layers.towers import find_towers
from penstock.splitting.pipe import Pipe
from tests.splitting.checking import gradients, squares
from tests.splitting.families.building import Built, build

__all__ = ["COLUMNS", "EXACT", "measure"]

EXACT = "exact"
COLUMNS = ("with an example", "without", "traced in 2")
# Parts that a family computes in float32 are rounded otherwise in a traced graph.
_LIMIT = 1e-8


def measure(kind: str) -> dict[str, Any]:
    """Return the class of a family and what became of it by each way of splitting."""
    built = build(kind)
    if isinstance(built, str):
        return {"kind": kind, "not built": built}
    row = {
        "kind": kind,
        "class": type(built.model).__name__,
        "inputs": list(built.inputs),
        "mode": "training" if built.is_training else "evaluation",
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
    expected = _reference(built)
    for name, (schedules, split) in ways.items():
        row[name] = _try(built, split, schedules, expected)
    return row


def _reference(built: Built) -> dict[str, torch.Tensor]:
    model = deepcopy(built.model)
    for row in range(4):
        loss = squares(model(**_rows(built.inputs, row))) / 4
        torch.autograd.backward(loss)
    return gradients(model)


def _rows(inputs: Mapping[str, Any], row: int) -> dict[str, Any]:
    return {name: value[row : row + 1] for name, value in inputs.items()}


def _try(
    built: Built,
    split: Callable[[nn.Module], Pipe],
    schedules: tuple[str, ...],
    expected: Mapping[str, torch.Tensor],
) -> str:
    for schedule in schedules:
        model = deepcopy(built.model)
        try:
            found = _train(model, split(model), schedule, built.inputs)
        except PenstockError as error:
            return f"refused: {error}"
        except Exception as error:  # to be counted as what no user should see
            return f"CRASH {schedule}: {type(error).__name__}: {error}"[:400]
        difference = _compare(found, expected)
        if difference:
            return f"WRONG {schedule}: {difference}"
    return EXACT


def _train(
    model: nn.Module, pipe: Pipe, schedule: str, inputs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    with ps.Pipeline(pipe, schedule, microbatches=4, loss=squares, reduction="mean") as pipeline:
        pipeline.step(**inputs, target=torch.zeros(4))
    return gradients(model)


def _compare(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
    if found.keys() != expected.keys():
        return f"gradients of other parameters: {sorted(found.keys() ^ expected.keys())[:3]}"
    worst = max(
        (((found[n] - e).abs().max() / (1 + e.abs().max())).item(), n) for n, e in expected.items()
    )
    return f"{worst[1]} by {worst[0]:.1e}" if not worst[0] <= _LIMIT else ""
