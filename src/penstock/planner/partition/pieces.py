"""Pieces of a model, such as layers or parts of a graph, with their costs."""

from dataclasses import dataclass, fields

from penstock.errors import CostsError
from penstock.untrusted import LARGEST, quote, to_quantity

__all__ = ["Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a model that stays whole: seconds per microbatch, and bytes.

    Parameters, gradients and optimizer state are held all the time, each counted as in `Costs`.
    `activation_bytes` are held for every microbatch in flight, `weight_stash_bytes` of them, or
    more, until its W. `message_bytes` is what the piece takes in, which is also what is held of it
    if its stage is checkpointed and begins with it; `workspace_bytes` is needed while it runs.

    `host_action` is the host's seconds for each action of a stage with this piece. They are not
    summed: a stage costs its host as much as the piece that costs it most.

    >>> Piece("layers.0", forward=1.0, backward_input=1.0, backward_weight=0.5).seconds
    2.5
    """

    name: str
    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activation_bytes: float = 0.0
    weight_stash_bytes: float = 0.0
    message_bytes: float = 0.0
    workspace_bytes: float = 0.0
    host_action: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if to_quantity(value) is None:
                raise CostsError(
                    f"{field.name} of piece {quote(self.name)} is {quote(value)}; "
                    f"give a number from 0 to {LARGEST:g}"
                )

    @classmethod
    def of_weight(cls, name: str, weight: float) -> "Piece":
        """Return a piece known only by its share of the work: a third each for F, I and W."""
        return cls(name, forward=weight / 3, backward_input=weight / 3, backward_weight=weight / 3)

    @property
    def resident_bytes(self) -> float:
        """The bytes that are held all the time: parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def seconds(self) -> float:
        """The seconds of one microbatch, forward and backward."""
        return self.forward + self.backward_input + self.backward_weight
