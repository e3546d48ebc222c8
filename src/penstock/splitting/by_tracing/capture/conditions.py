"""Conditions on values: what a traced path relies on is checked by a node of the graph.

lengths = torch.ops.aten.sub.Tensor(ends, starts)
torch.ops.penstock.require_values(lengths, "[16, 16]", "grid", "vision.py:12 `...`")
"""

import torch
from torch import fx

from penstock.errors import BatchError

__all__ = ["require_values"]

_SHOWN = 120

torch.library.define(
    "penstock::require_values", "(Tensor found, str expected, str inputs, str place) -> ()"
)


@torch.library.impl("penstock::require_values", "CompositeExplicitAutograd")
def _check(found: torch.Tensor, expected: str, inputs: str, place: str) -> None:
    given = str(found.tolist())
    if given != expected:
        raise BatchError(
            f"what the traced model reads of {inputs} must be {_shorten(expected)} as in its "
            f"example (got {_shorten(given)}), at {place}; trace with an example that has the "
            "values of all your batches, or split the model by layers"
        )


def _assume(found: torch.Tensor, expected: str, inputs: str, place: str) -> None:  # noqa: ARG001  # the operation's form
    return None


torch.library.register_fake("penstock::require_values", _assume)
# Adds to the graph that is traced that a tensor must have these values in every run.
require_values = torch.ops.penstock.require_values.default
fx.node.has_side_effect(require_values)


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
