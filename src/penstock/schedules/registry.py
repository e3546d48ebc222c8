"""The families by name. Adding one is one line here, or one call of `register`."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias

from penstock.errors import ScheduleNameError
from penstock.ir.schedule import Schedule
from penstock.schedules.controllable import v_half, v_min
from penstock.schedules.dualpipe import dualpipe, dualpipe_v
from penstock.schedules.forward_only import forward_only
from penstock.schedules.gpipe import gpipe
from penstock.schedules.interleaved import interleaved_one_f_one_b, interleaved_zero_bubble
from penstock.schedules.looped_bfs import looped_bfs
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.schedules.v_shape import zbv
from penstock.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2

__all__ = ["FAMILIES", "Family", "Generator", "find_family", "register"]

# Takes ranks, microbatches and stages per rank.
Generator: TypeAlias = Callable[[int, int, int], Schedule]


@dataclass(frozen=True, slots=True)
class Family:
    """A named way to order work: its generator, its usual stages per rank, its other names.

    `copies` says how many copies of the model its stages are.
    """

    name: str
    generate: Generator
    stages_per_rank: int
    aliases: tuple[str, ...] = ()
    copies: int = 1

    @property
    def summary(self) -> str:
        """The first line of the generator's docstring."""
        return (self.generate.__doc__ or "").strip().partition("\n")[0]


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("ForwardOnly", forward_only, 1, ("_ScheduleForwardOnly",)),
        Family("GPipe", gpipe, 1, ("ScheduleGPipe",)),
        Family("1F1B", one_f_one_b, 1, ("Schedule1F1B",)),
        Family("Interleaved1F1B", interleaved_one_f_one_b, 2, ("ScheduleInterleaved1F1B",)),
        Family("LoopedBFS", looped_bfs, 2, ("ScheduleLoopedBFS",)),
        Family("ZB-H1", zero_bubble_h1, 1, ("ZBH1",)),
        Family("ZB-H2", zero_bubble_h2, 1, ("ZBH2",)),
        Family(
            "InterleavedZeroBubble",
            interleaved_zero_bubble,
            2,
            ("ScheduleInterleavedZeroBubble",),
        ),
        Family("ZBV", zbv, 2, ("ZBVZeroBubble", "ScheduleZBVZeroBubble", "ZB-V")),
        Family("V-Half", v_half, 2, ("VHalf",)),
        Family("V-Min", v_min, 2, ("VMin",)),
        Family("DualPipeV", dualpipe_v, 2, ("ScheduleDualPipeV",)),
        Family("DualPipe", dualpipe, 2, copies=2),
    )
}


def register(name: str, generate: Generator, *, stages_per_rank: int = 1) -> None:
    """Register a family of your own by name.

    `generate` takes ranks, microbatches and stages per rank and returns a `Schedule`;
    `stages_per_rank` is the default that `build` passes.
    """
    taken = _find_spelling(name)
    if taken is not None:
        raise ScheduleNameError(f"{name!r} is already the name of {taken.name}; choose another")
    FAMILIES[name] = Family(name, generate, stages_per_rank)


def find_family(name: str) -> Family:
    """Return the family with this name or torch's class name, in any case."""
    family = _find_spelling(name)
    if family is None:
        close = get_close_matches(name.lower(), [known.lower() for known in FAMILIES], n=1)
        meant = [known for known in FAMILIES if known.lower() in close]
        hint = f"did you mean {meant[0]}? " if meant else ""
        raise ScheduleNameError(
            f"unknown schedule {name!r}; {hint}known are {', '.join(FAMILIES)}"
        )
    return family


def _find_spelling(name: str) -> Family | None:
    """Return the family with this name or alias in any case, if there is one."""
    wanted = name.lower()
    for family in FAMILIES.values():
        if wanted in (spelling.lower() for spelling in (family.name, *family.aliases)):
            return family
    return None
