"""The choices of a search besides the order, which a user must follow."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from penstock.errors import PlanError
from penstock.untrusted import quote

__all__ = ["Choices"]


@dataclass(frozen=True, slots=True)
class Choices:
    """How a model is cut, what it recomputes, the microbatch size, and when ranks wait.

    `sizes` is how many layers each stage gets, as `split(model, layers=..., stages=sizes)` takes
    it; `checkpointed` names the stages that keep only their input and run forward again. With
    `is_checked_after`, a rank does not wait for the others before its optimizer step, and what
    they have to say about it (a norm, an overflow) is looked at afterwards.

    >>> print(Choices(sizes=(3, 4), checkpointed=(0,), microbatch_size=2))
    layers per stage: 3 4; checkpointed stages: 0; microbatches of 2
    """

    sizes: tuple[int, ...]
    checkpointed: tuple[int, ...] = ()
    microbatch_size: int = 1
    is_checked_after: bool = False

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

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "Choices":
        """Return choices from names and whole numbers, every one of them checked."""
        names = [field.name for field in fields(cls)]
        if set(values) != set(names):
            raise PlanError(f"choices must be {', '.join(names)} (got {quote(list(values))})")
        sizes, checkpointed = (_whole_numbers(name, values[name]) for name in names[:2])
        (microbatch_size,) = _whole_numbers("microbatch_size", [values["microbatch_size"]])
        is_checked_after = values["is_checked_after"]
        if not isinstance(is_checked_after, bool):
            raise PlanError(
                f"is_checked_after must be true or false (got {quote(is_checked_after)})"
            )
        return cls(sizes, checkpointed, microbatch_size, is_checked_after)

    def to_mapping(self) -> dict[str, object]:
        """Return names and plain values, from which `from_mapping` makes the same choices."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        listed = " ".join(map(str, self.checkpointed)) or "none"
        lines = [
            f"layers per stage: {' '.join(map(str, self.sizes))}",
            f"checkpointed stages: {listed}",
            f"microbatches of {self.microbatch_size}",
        ]
        if self.is_checked_after:
            lines.append("optimizer step checked after the fact")
        return "; ".join(lines)


def _whole_numbers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise PlanError(f"{name} must be whole numbers (got {quote(value)})")
    return tuple(value)
