"""The ways in which users run a step: recorded, traced, with hooks on what is saved and so on.

None of them changes a number, so the plain model takes no notice of them.
"""

from contextlib import AbstractContextManager, nullcontext
from random import Random

import torch

from tests.differential.case import Case, Edit

__all__ = ["WAYS", "draw_ways", "in_this_way"]

# The step is run so, or on a pipeline that is built again; an evaluation comes before it, with
# another number of microbatches; or a step that fails in a backward.
WAYS = ("recorded", "traced", "hooked", "rebuilt", "evaluated", "break")
_SHARE = 0.1


def draw_ways(chance: Random, case: Case) -> list[tuple[Edit, ...]]:
    """Draw in which ways each step of a case is run."""
    return [
        tuple(
            Edit(way, chance.randrange(len(case.parts)) if way == "break" else 0)
            for way in WAYS
            if chance.random() < _SHARE
        )
        for _ in case.steps
    ]


def in_this_way(way: str) -> AbstractContextManager[object]:
    """Return what a step is run in."""
    match way:
        case "traced":
            return torch.autograd.set_detect_anomaly(True, check_nan=False)
        case "hooked":
            return torch.autograd.graph.saved_tensors_hooks(torch.clone, _keep)
        case _:
            return nullcontext()


def _keep(saved: torch.Tensor) -> torch.Tensor:
    return saved
