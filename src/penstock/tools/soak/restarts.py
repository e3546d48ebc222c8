"""Elastic cases of a soak: one training through several starts, each with other ranks.

    start 0   4 ranks   ... rank 2 is killed in step 5
    start 1   3 ranks   the last checkpoint, ... rank 0 exits while all of them build
    start 2   2 ranks   the last checkpoint, ... to the last step

In place of torchrun, the soak's own processes are started again.
"""

from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias, get_args

__all__ = [
    "ElasticCase",
    "ElasticFault",
    "ElasticFaultKind",
    "Place",
    "Start",
    "draw_elastic_case",
]

ElasticFaultKind: TypeAlias = Literal["exit", "kill", "stop"]
# Before a rank has met the others, while all build, and where a step begins: the step before it
# may be saved at that moment.
Place: TypeAlias = Literal["start", "build", "step"]

_SHARE = 0.05
_PLACES: tuple[Place, ...] = ("start", "build", "step", "step", "step", "step")
_FEWEST_STEPS, _MOST_STEPS = 6, 14
_MOST_FAULTS = 3


@dataclass(frozen=True, slots=True)
class ElasticFault:
    """What happens to which rank, and where; `step` counts only where a step begins."""

    kind: ElasticFaultKind
    rank: int
    place: Place
    step: int


@dataclass(frozen=True, slots=True)
class Start:
    """How many ranks start, and what happens to them; the last start has no fault."""

    ranks: int
    fault: ElasticFault | None


@dataclass(frozen=True, slots=True)
class ElasticCase:
    """A training with everything that happens to it; `seed` decides its numbers."""

    number: int
    seed: int
    layers: int
    microbatches: int
    steps: int
    save_every: int
    starts: tuple[Start, ...]

    def __str__(self) -> str:
        starts = ", then ".join(_describe(start) for start in self.starts)
        return (
            f"case {self.number}: elastic, {self.layers} layers, {self.microbatches} "
            f"microbatches, {self.steps} steps, saved every {self.save_every}: {starts}"
        )


def _describe(start: Start) -> str:
    ranks, fault = f"{start.ranks} ranks", start.fault
    if fault is None:
        return ranks
    when = f"step {fault.step}" if fault.place == "step" else f"the {fault.place}"
    return f"{ranks} with {fault.kind} on rank {fault.rank} in {when}"


def draw_elastic_case(
    seed: int, number: int, *, ranks: int, has_faults: bool
) -> ElasticCase | None:
    """Return the case with this number of the soak with this seed, if it is an elastic one.

    >>> case = draw_elastic_case(0, 31, ranks=4, has_faults=True)
    >>> case == draw_elastic_case(0, 31, ranks=4, has_faults=True)
    True
    """
    chance = Random(f"elastic {seed} {number}")
    if ranks < 2 or chance.random() >= _SHARE:
        return None
    steps = chance.randint(_FEWEST_STEPS, _MOST_STEPS)
    starts = []
    for _ in range(chance.randint(1, _MOST_FAULTS)):
        size = chance.randint(2, ranks)
        place, kind = chance.choice(_PLACES), chance.choice(get_args(ElasticFaultKind))
        fault = ElasticFault(kind, chance.randrange(size), place, chance.randrange(steps))
        starts.append(Start(size, fault if has_faults else None))
    return ElasticCase(
        number=number,
        seed=chance.getrandbits(32),
        layers=chance.randint(ranks, ranks + 4),
        microbatches=chance.randint(2, 6),
        steps=steps,
        save_every=chance.randint(1, 3),
        starts=(*starts, Start(chance.randint(1, ranks), None)),
    )
