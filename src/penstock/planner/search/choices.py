"""The choices of a search besides the order, which a user must follow."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from penstock.errors import PlanError
from penstock.untrusted import quote, to_quantity

__all__ = ["Choices"]


@dataclass(frozen=True, slots=True)
class Choices:
    """How a model is cut, what it recomputes, the microbatch size, and the copies of the model.

    `sizes` is how many layers each stage gets, as `split(model, layers=..., stages=sizes)` takes
    it; `checkpointed` names the stages that keep only their input and run forward again.
    `replicas` copies of the pipeline divide the batch, and reduce their gradients at the end of a
    step in `reduction_seconds`.

    >>> print(Choices(sizes=(3, 4), checkpointed=(0,), microbatch_size=2))
    layers per stage: 3 4; checkpointed stages: 0; microbatches of 2
    """

    sizes: tuple[int, ...]
    checkpointed: tuple[int, ...] = ()
    microbatch_size: int = 1
    replicas: int = 1
    reduction_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise PlanError(
                f"every stage must have at least one layer (sizes: {quote(self.sizes)})"
            )
        if not set(self.checkpointed) <= set(range(len(self.sizes))):
            raise PlanError(
                f"checkpointed stages must be from 0 to {len(self.sizes) - 1} "
                f"(checkpointed: {quote(self.checkpointed)})"
            )
        if self.microbatch_size < 1:
            raise PlanError(f"microbatch_size must be at least 1 (got {self.microbatch_size})")
        if self.replicas < 1:
            raise PlanError(f"replicas must be at least 1 (got {self.replicas})")
        if to_quantity(self.reduction_seconds) is None:
            raise PlanError(
                f"reduction_seconds must be a number from 0 (got {quote(self.reduction_seconds)})"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "Choices":
        """Return choices from names and whole numbers, every one of them checked."""
        names = [field.name for field in fields(cls)]
        # Files from before there were replicas do not have the last two.
        given = list(values)
        values = {"replicas": 1, "reduction_seconds": 0.0} | dict(values)
        if set(values) != set(names):
            raise PlanError(f"choices must be {', '.join(names)} (got {quote(given)})")
        sizes, checkpointed = (_whole_numbers(name, values[name]) for name in names[:2])
        size, replicas = (
            _whole_numbers(name, [values[name]])[0] for name in ("microbatch_size", "replicas")
        )
        reduction = to_quantity(values["reduction_seconds"])
        if reduction is None:
            raise PlanError("reduction_seconds must be a number of seconds from 0")
        return cls(sizes, checkpointed, size, replicas, reduction)

    def to_mapping(self) -> dict[str, object]:
        """Return names and plain values, from which `from_mapping` makes the same choices."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        listed = " ".join(map(str, self.checkpointed)) or "none"
        parts = [
            f"layers per stage: {' '.join(map(str, self.sizes))}",
            f"checkpointed stages: {listed}",
            f"microbatches of {self.microbatch_size}",
        ]
        if self.replicas > 1:
            reduction = f"reduction {self.reduction_seconds:.4g} s more per step"
            parts.append(f"replicas: {self.replicas}, {reduction}")
        return "; ".join(parts)


def _whole_numbers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise PlanError(f"{name} must be whole numbers (got {quote(value)})")
    return tuple(value)
