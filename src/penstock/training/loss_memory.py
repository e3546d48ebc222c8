"""What a pipeline has learned of how its loss is made, from one step to the next."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from penstock.training.labels import Source
from penstock.training.loss_calls import LossCall, Mean
from penstock.training.loss_form import LossForm

__all__ = ["Habit", "KnownForm", "LossMemory", "Reading", "Term"]

# What a call comes to in the loss: a mean over what it counts, a sum, or neither of them.
Reading: TypeAlias = Literal["mean", "sum", "rest"]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A call that the loss is made of: what it comes to, what it counts, and in which labels."""

    reduction: str
    reading: Reading
    mean: Mean
    source: Source | None

    def is_like(self, call: LossCall) -> bool:
        """Whether a call may be the same one, in another microbatch."""
        return self.reduction == call.reduction and self.mean.is_like(call.mean)


@dataclass(slots=True)
class Habit:
    """How the loss of one kind of step is made.

    `single` is the one call inside of the last stage that is the loss, if it is known to be all,
    and `top` the operation that has made it; such a stage need not be watched every time.
    """

    steps: int = 0
    is_settled: bool = False
    is_opaque: bool = False
    must_watch: bool = False
    is_mixed: bool = False
    single: Term | None = None
    top: str = ""
    terms: tuple[Term, ...] = ()

    @property
    def is_due(self) -> bool:
        """Whether this step looks again at how the loss is made: 1, 2, 4, 8 and so on."""
        return self.steps & (self.steps - 1) == 0

    def forget(self) -> None:
        """Look again in the next step."""
        self.is_settled, self.single, self.terms = False, None, ()


@dataclass(frozen=True, slots=True)
class KnownForm:
    """The form of a loss as training has shown it, and how much each of its calls counts in it."""

    num_calls: int
    form: LossForm
    factors: tuple[float, ...] = ()


@dataclass(slots=True)
class LossMemory:
    """The habits of a pipeline, and the forms of its losses, by what a step is given."""

    habits: dict[Hashable, Habit] = field(default_factory=dict)
    forms: dict[Hashable, KnownForm] = field(default_factory=dict)

    def begin_step(self, key: Hashable) -> Habit:
        """Return how the loss of such a step is made, which may be new."""
        habit = self.habits.setdefault(key, Habit())
        habit.steps += 1
        return habit
