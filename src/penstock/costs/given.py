"""The costs that a caller gives, or unit costs."""

from penstock.costs.costs import Costs
from penstock.errors import CostsError

__all__ = ["costs_or_unit"]


def costs_or_unit(given: Costs | None) -> Costs:
    """Return the given costs, or unit costs if there are none; anything else is an error."""
    if given is None:
        return Costs()
    if not isinstance(given, Costs):
        raise CostsError(
            f"costs must be a Costs (got a value of type {type(given).__name__}); write "
            "Costs(forward=1), or Costs.from_mapping for names and numbers"
        )
    return given
