"""What a pipeline has learned of how its loss is made, from one step to the next."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from penstock.loss.calls import LossCall, Mean
from penstock.loss.form import LossForm
from penstock.loss.labels import Source

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

    @property
    def is_counted(self) -> bool:
        """Whether it is known what it counts in every microbatch, and checked."""
        return self.reading == "sum" or (self.reading == "mean" and self.source is not None)

    def is_like(self, call: LossCall) -> bool:
        """Whether a call may be the same one, in another microbatch."""
        return self.reduction == call.reduction and self.mean.is_like(call.mean)


# How many ways of making the loss are remembered for one kind of step; the oldest go first.
_MOST_WAYS = 8


@dataclass(slots=True, eq=False)
class Habit:
    """How the loss of one kind of step is made.

    `is_left` says that it need not be watched every time: it is the result of the call `single`,
    or of none that says what it counts, and `top` is the operation that has made it; `signatures`
    are the tops of its graphs. `is_counted` says that all of it is known by what it counts;
    `is_tried` that a step was compared with its whole batch, or could not be, in which a wrong
    weight would have shown; `is_confirmed` that labels counted unevenly in such a batch.
    """

    steps: int = 0
    is_left: bool = False
    is_opaque: bool = False
    is_mixed: bool = True
    single: Term | None = None
    top: str = ""
    terms: tuple[Term, ...] = ()
    signatures: set[str] = field(default_factory=set)
    is_counted: bool = False
    is_tried: bool = False
    is_confirmed: bool = False

    @property
    def is_watched(self) -> bool:
        """Whether this step looks at how the loss is made: in steps 1, 2, 4, 8 and so on."""
        return not self.is_left or (self.is_due and not self.is_opaque)

    @property
    def is_due(self) -> bool:
        """Whether this step finds out anew what was known."""
        return self.steps & (self.steps - 1) == 0

    def forget(self) -> None:
        """Look again from now on."""
        self.is_left, self.single, self.terms = False, None, ()


@dataclass(frozen=True, slots=True)
class KnownForm:
    """The form of a loss as training has shown it, and how much each of its calls counts in it."""

    num_calls: int
    form: LossForm
    factors: tuple[float, ...] = ()
    has_trained_factor: bool = False


@dataclass(slots=True)
class LossMemory:
    """The habits of a pipeline, and the forms of its losses, by what a step is given."""

    habits: dict[Hashable, list[Habit]] = field(default_factory=dict)
    forms: dict[Hashable, KnownForm] = field(default_factory=dict)
    has_warned: bool = False

    def begin_step(self, key: Hashable) -> Habit:
        """Return how the loss of such a step was made last, which may be new."""
        habit = self.habits.setdefault(key, [Habit()])[-1]
        habit.steps += 1
        return habit

    def switch(self, key: Hashable, signature: str) -> Habit:
        """Return how a loss with another graph than in the step before is made."""
        habits = self.habits[key]
        known = [habit for habit in habits if signature in habit.signatures]
        habit = known[-1] if known else Habit()
        habit.steps += 1
        others = [other for other in habits if other is not habit]
        self.habits[key] = [*others[-_MOST_WAYS:], habit]
        return habit
