"""Runs of a pipeline beside runs of the library alone: their losses and the models they save."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

__all__ = ["assert_same", "logs_of"]


def logs_of(folder: Path) -> list[tuple[str, float]]:
    return [(name, value) for name, value in json.loads((folder / "logs.json").read_text())]


def assert_same(found: Path, expected: Path, *, limit: float = 1e-5) -> None:
    """Compare what both have logged; a run that was resumed has logged the end only."""
    mine, others = logs_of(found), logs_of(expected)
    assert mine
    others = others[-len(mine) :]
    assert [name for name, _ in mine] == [name for name, _ in others]
    for (name, value), (_, other) in zip(mine, others, strict=True):
        assert abs(value - other) <= limit * max(1.0, abs(other)), (name, value, other)
    weights, exact = _weights(found), _weights(expected)
    assert weights.keys() == exact.keys()
    for name, tensor in exact.items():
        # Adam divides by the roots of what it has seen, which may be very small.
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=3e-4, msg=name)


def _weights(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted((folder / "final").glob("*.safetensors")):
        found |= load_file(file)
    assert found
    return found
