"""What one case of the fuzzer is, as plain values: printing one gives the text that makes it."""

from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

__all__ = [
    "CLASSES", "VOCABULARY", "WIDTH",
    "Block", "Case", "Door", "Edit", "Order", "Part", "Step", "literal",
]  # fmt: skip

# The features of every activation. Weights are square, so that they can be transposed in place.
WIDTH = 4
# The number of different tokens, and of classes that the last part distinguishes.
VOCABULARY = 7
CLASSES = 3

# How the model comes to the pipeline: its parts as a list, by stage, as a `Pipe`, or cut by us.
Door: TypeAlias = Literal["list", "mapping", "pipe", "layers", "traced"]


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a part: what it computes (`blocks.py`), and what was done to it."""

    kind: str
    traits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the model: its blocks, the form of what it sends, and what else it does."""

    blocks: tuple[Block, ...] = ()
    sends: str = "tensor"
    traits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """A family in some size, or every rank's actions where there are any; and what was added.

    `recomputed` and `offloaded` are pairs of a stage and a microbatch. `joined` are rows of the
    schedule that overlap with the row before, as far as they can.
    """

    family: str = "1F1B"
    ranks: int = 1
    per_rank: int = 1
    microbatches: int = 1
    actions: tuple[str, ...] = ()
    recomputed: tuple[tuple[int, int], ...] = ()
    offloaded: tuple[tuple[int, int], ...] = ()
    joined: tuple[int, ...] = ()

    @property
    def has_additions(self) -> bool:
        """Whether the schedule is another one than its family or its actions say."""
        return bool(self.recomputed or self.offloaded or self.joined)


@dataclass(frozen=True, slots=True)
class Edit:
    """Something the user does before a step, to one part of the model where it says which."""

    kind: str
    part: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The form of one batch, how it is given, and what happens before it."""

    rows: int = 2
    length: int = 2
    given: str = "plain"
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a loss, a schedule and the steps that are trained; `seed` gives all numbers.

    Every part feeds the next one; `skips` are further edges. `ties` are pairs of parts whose first
    linear layers have one weight. A `length` of 0 in every step means activations without time.
    """

    seed: int
    parts: tuple[Part, ...]
    order: Order = Order()
    loss: str = "mse"
    steps: tuple[Step, ...] = (Step(),)
    skips: tuple[tuple[int, int], ...] = ()
    ties: tuple[tuple[int, int], ...] = ()
    door: Door = "list"
    inputs: str = "floats"

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Which part feeds which."""
        return tuple(sorted({*pairwise(range(len(self.parts))), *self.skips}))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of all parts."""
        return tuple(block for part in self.parts for block in part.blocks)

    @property
    def traits(self) -> frozenset[str]:
        """What was done to any block or part."""
        of_blocks = (trait for block in self.blocks for trait in block.traits)
        return frozenset(of_blocks) | {trait for part in self.parts for trait in part.traits}

    @property
    def kinds(self) -> frozenset[str]:
        """What blocks compute."""
        return frozenset(block.kind for block in self.blocks)

    @property
    def edits(self) -> frozenset[str]:
        """What is done before any step."""
        return frozenset(edit.kind for step in self.steps for edit in step.edits)


def literal(value: object) -> str:
    """The Python text that makes a case, without what is as it is by default.

    >>> literal(Case(3, (Part((Block("linear"),)),), Order(microbatches=2)))
    "Case(seed=3, parts=(Part(blocks=(Block(kind='linear'),)),), order=Order(microbatches=2))"
    """
    if isinstance(value, tuple):
        items = [literal(item) for item in value]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if not is_dataclass(value):
        return repr(value)
    shown = [
        f"{field.name}={literal(getattr(value, field.name))}"
        for field in fields(value)
        if field.default is MISSING or getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"
