"""The closed formulae of each family: idle seconds of a step, and microbatches in memory.

p is ranks, m microbatches, v stages per rank; F, I and W are the seconds of one rank's share of
the model, B is I and W together, and F&B an overlapped pair. The bubble is counted as in papers,
as the idle time of the rank with the longest span, with free transfers and enough microbatches to
fill the pipe. Tests check each formula against the simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["FORMULAE", "At", "Formula", "Formulae"]


@dataclass(frozen=True, slots=True)
class At:
    """Where a formula is evaluated: ranks, microbatches, stages per rank, and seconds.

    `pair` is what an overlapped F and B take together: F+B, unless they hide behind each other.
    """

    p: int
    m: int
    v: int
    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    pair: float = 3.0

    @property
    def whole(self) -> float:
        """F+B, the seconds of a microbatch on one rank."""
        return self.forward + self.backward

    @property
    def backward(self) -> float:
        """B, the seconds of both halves of the backward."""
        return self.backward_input + self.backward_weight


Value: TypeAlias = Callable[[At], float]


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula as a paper would print it, and its value or, if not exact, its maximum.

    Values are linear in the seconds. `for_equal_costs` says that it is exact for F = I = W only.
    """

    text: str
    value: Value
    is_exact: bool = True
    for_equal_costs: bool = False


@dataclass(frozen=True, slots=True)
class Formulae:
    """The formulae of one family."""

    bubble: Formula
    memory: Formula


_ALL = Formula("m", lambda at: at.m)
_AS_RANKS = Formula("p", lambda at: at.p)
_FILL_AND_DRAIN = Formula("(p-1)(F+B)", lambda at: (at.p - 1) * at.whole)
_INTERLEAVED = Formula("(p-1)(F+B)/v", lambda at: (at.p - 1) * at.whole / at.v)


def _after_input(at: At) -> float:
    """F+I-W: what is left of a hop's wait if one W fills it."""
    return at.forward + at.backward_input - at.backward_weight


def _dual(at: At) -> float:
    """F&B+B-3W."""
    return at.pair + at.backward - 3 * at.backward_weight


FORMULAE: dict[str, Formulae] = {
    "ForwardOnly": Formulae(
        Formula("0", lambda _: 0), Formula("0: no graph is kept", lambda _: 0)
    ),
    "GPipe": Formulae(_FILL_AND_DRAIN, _ALL),
    "1F1B": Formulae(_FILL_AND_DRAIN, _AS_RANKS),
    "Interleaved1F1B": Formulae(
        _INTERLEAVED, Formula("p + (p-1)/v", lambda at: at.p + (at.p - 1) / at.v)
    ),
    "LoopedBFS": Formulae(_INTERLEAVED, _ALL),
    "ZB-H1": Formulae(
        Formula("(p-1)(F+I-W)", lambda at: (at.p - 1) * _after_input(at)), _AS_RANKS
    ),
    "ZB-H2": Formulae(
        Formula("(p-1)(F+I-2W)", lambda at: (at.p - 1) * (_after_input(at) - at.backward_weight)),
        Formula("2p-1", lambda at: 2 * at.p - 1),
    ),
    "InterleavedZeroBubble": Formulae(
        Formula("(p-1)(F+I-W)/v", lambda at: (at.p - 1) * _after_input(at) / at.v), _AS_RANKS
    ),
    "ZBV": Formulae(Formula("0 for F = I = W", lambda _: 0, for_equal_costs=True), _AS_RANKS),
    "V-Half": Formulae(
        Formula(
            "at most half that of 1F1B",
            lambda at: (at.p - 1) * at.whole / 2,
            is_exact=False,
            for_equal_costs=True,
        ),
        Formula("(p+2)//2", lambda at: (at.p + 2) // 2),
    ),
    "V-Min": Formulae(
        Formula(
            "at most two thirds that of 1F1B",
            lambda at: (at.p - 1) * at.whole * 2 / 3,
            is_exact=False,
            for_equal_costs=True,
        ),
        Formula("(p+4)//3", lambda at: (at.p + 4) // 3),
    ),
    "DualPipeV": Formulae(
        Formula("(p-1)(F&B+B-3W)/2", lambda at: (at.p - 1) * _dual(at) / 2, for_equal_costs=True),
        Formula("p + 1/2", lambda at: at.p + 1 / 2),
    ),
    "DualPipe": Formulae(
        Formula("(p/2-1)(F&B+B-3W)", lambda at: (at.p / 2 - 1) * _dual(at), for_equal_costs=True),
        Formula("p + 1", lambda at: at.p + 1),
    ),
}
