"""Costs of actions: seconds and bytes per stage and kind of action, of the host and of links."""

from penstock.costs.costs import COLLECTIVES, PER_STAGE, Costs
from penstock.costs.gains import Gains, gain_of_rows, name_pair, shares_to_shorten
from penstock.costs.numbers import PerLink, PerStage
from penstock.costs.pricing import Prices, price, scale_of_rows, transfer_seconds

__all__ = [
    "COLLECTIVES",
    "PER_STAGE",
    "Costs",
    "Gains",
    "PerLink",
    "PerStage",
    "Prices",
    "gain_of_rows",
    "name_pair",
    "price",
    "scale_of_rows",
    "shares_to_shorten",
    "transfer_seconds",
]
