"""Costs of actions: seconds and bytes per stage and kind of action, of the host and of links."""

from penstock.costs.costs import COLLECTIVES, Costs
from penstock.costs.numbers import PerLink, PerStage
from penstock.costs.pricing import Prices, price, scale_of_rows, transfer_seconds

__all__ = [
    "COLLECTIVES",
    "Costs",
    "PerLink",
    "PerStage",
    "Prices",
    "price",
    "scale_of_rows",
    "transfer_seconds",
]
