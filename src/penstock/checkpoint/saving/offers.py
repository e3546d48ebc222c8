"""What a process offers to save, as plain values for the first process: nothing is unpickled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.checkpoint.parts import Part
from penstock.errors import CheckpointError

__all__ = ["Offer", "check_agreement", "setting_from_value", "setting_to_value"]


@dataclass(frozen=True, slots=True)
class Offer:
    """What a process holds; `parts` is None if they are those of the save before."""

    step: int
    data: str
    optimizer: str | None
    parts: tuple[Part, ...] | None
    values: dict[str, Any]
    aliases: dict[str, str]

    def to_values(self) -> dict[str, Any]:
        """Return the fields as plain values, by name."""
        return {
            "step": self.step,
            "data": self.data,
            "optimizer": self.optimizer,
            "parts": None if self.parts is None else [part.to_values() for part in self.parts],
            "values": {key: setting_to_value(value) for key, value in self.values.items()},
            "aliases": self.aliases,
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Offer":
        """Return the offer of plain values."""
        parts = values["parts"]
        return cls(
            values["step"],
            values["data"],
            values["optimizer"],
            None if parts is None else tuple(map(Part.from_values, parts)),
            {key: setting_from_value(value) for key, value in values["values"].items()},
            values["aliases"],
        )


def check_agreement(offers: Sequence[Offer]) -> None:
    """Refuse a save that is not the same on all ranks."""
    for rank, offer in enumerate(offers):
        for what, own, first in (
            ("step", offer.step, offers[0].step),
            ("data", offer.data, offers[0].data),
            ("optimizer", offer.optimizer, offers[0].optimizer),
        ):
            if own != first:
                raise CheckpointError(
                    f"{what} must be the same on all ranks (rank 0: {first}, rank {rank}: {own}); "
                    "give all ranks the same"
                )


def setting_to_value(setting: Any) -> Any:
    """Return a plain value of a checkpoint for JSON, which has no tuples.

    >>> setting_to_value((0.9, 0.999))
    {'tuple': [0.9, 0.999]}
    """
    return {"tuple": list(setting)} if isinstance(setting, tuple) else setting


def setting_from_value(value: Any) -> Any:
    """Return the plain value of one from JSON."""
    return tuple(value["tuple"]) if isinstance(value, dict) else value
