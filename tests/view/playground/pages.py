"""Helpers for tests of the playground: the page, built once, and settings as costs."""

from functools import cache
from typing import Any

from penstock.costs import Costs
from penstock.schedules.registry import FAMILIES, Family
from penstock.view.playground.catalogue import choices_of
from penstock.view.playground.page import playground

__all__ = ["COSTS", "page", "settings", "stages_of"]

# What the page calls the costs, and the same for Python.
SETTINGS: dict[str, float] = {
    "forward": 1.0,
    "input": 1.3,
    "weight": 0.7,
    "transfer": 0.12,
    "gain": 0.25,
    "activation": 1.25,
    "stash": 0.5,
}
COSTS = Costs(
    forward=1.0,
    backward_input=1.3,
    backward_weight=0.7,
    transfer=0.12,
    overlap_gain=0.25,
    activation_bytes=1.25,
    weight_stash_bytes=0.5,
)


@cache
def page() -> str:
    return playground()


@cache
def stages_of(name: str, wanted: int) -> int:
    """Return the stages per rank of a family where the slider says `wanted`."""
    family: Family = FAMILIES[name]
    return wanted if wanted in choices_of(family) else family.stages_per_rank


def settings(**sizes: Any) -> dict[str, Any]:
    return SETTINGS | sizes
