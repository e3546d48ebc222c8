"""The small language that the families are written in.

A rank's order is a few phases, each a pattern that is repeated. A pattern names kinds and the
rank's own stages, counted from 0; brackets make an overlap. Microbatches are counted, not named:

    phases([4, 7], [(3, "F0"), (5, "(F0 B1)"), (3, "B1")], range(8))

runs stage 4 forward three times, then five overlapped pairs, then stage 7 backward three times.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.rows import Bools, Ints, Rows
from penstock.ir.schedule import Schedule

__all__ = ["Moves", "alternate", "assemble", "count_microbatches", "join", "phases", "sweep"]

_KINDS = {kind.text: kind for kind in Kind if kind.is_compute}
_TOKEN = re.compile(r"(\()?([FIWB])([0-9]+)(\))?")


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """A stretch of one rank's order, as columns."""

    kind: Ints
    stage: Ints
    microbatch: Ints
    joined: Bools

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, part: slice) -> "Moves":
        return Moves(self.kind[part], self.stage[part], self.microbatch[part], self.joined[part])


def sweep(kind: Kind, stage: int, microbatches: range) -> Moves:
    """Return one kind of work on one stage for these microbatches, one after the other."""
    number = np.arange(microbatches.start, microbatches.stop, microbatches.step, dtype=np.int32)
    size = len(number)
    return Moves(np.full(size, kind), np.full(size, stage), number, np.zeros(size, np.bool_))


def join(parts: Iterable[Moves]) -> Moves:
    """Return one stretch after the other."""
    pieces = list(parts)
    return Moves(
        np.concatenate([piece.kind for piece in pieces]),
        np.concatenate([piece.stage for piece in pieces]),
        np.concatenate([piece.microbatch for piece in pieces]),
        np.concatenate([piece.joined for piece in pieces]),
    )


def alternate(*sequences: Moves) -> Moves:
    """Return one move of each sequence in turn, the shorter ones stopping where they end."""
    turn = np.concatenate([np.arange(len(moves)) for moves in sequences])
    number = np.repeat(np.arange(len(sequences)), [len(moves) for moves in sequences])
    order = np.lexsort((number, turn))
    moves = join(sequences)
    return Moves(
        moves.kind[order], moves.stage[order], moves.microbatch[order], moves.joined[order]
    )


def phases(stages: Sequence[int], steps: Sequence[tuple[int, str]], *shares: range) -> Moves:
    """Repeat patterns over a rank's own stages, and number the microbatches.

    Each share is the microbatches of the stage at that place; a single share is for all stages.
    Moves for microbatches beyond a share are left out.
    """
    patterns = [(max(times, 0), _read_pattern(text)) for times, text in steps]
    kind = np.concatenate([np.tile(pattern[0], times) for times, pattern in patterns])
    local = np.concatenate([np.tile(pattern[1], times) for times, pattern in patterns])
    joined = np.concatenate([np.tile(pattern[2], times) for times, pattern in patterns])
    count = count_microbatches(kind, local, len(stages))
    share_of_place = shares * len(stages) if len(shares) == 1 else shares
    begins = np.array([share.start for share in share_of_place])
    lengths = np.array([len(share) for share in share_of_place])
    kept = count < lengths[local]
    # A pair that loses its first half is not a pair any more.
    joined[1:] &= kept[:-1]
    microbatch = begins[local] + count
    return Moves(kind[kept], np.array(stages)[local[kept]], microbatch[kept], joined[kept])


def count_microbatches(kind: Ints, stage: Ints, num_stages: int) -> NDArray[np.int32]:
    """Number the moves of each kind and stage from 0; a full backward counts as both halves."""
    count = np.zeros(len(kind), dtype=np.int32)
    for number in range(num_stages):
        here = stage == number
        for kinds in (
            (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD),
            (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD),
            (Kind.FORWARD,),
        ):
            found = np.flatnonzero(here & np.isin(kind, kinds))
            count[found] = np.arange(len(found))
    return count


@cache
def _read_pattern(text: str) -> tuple[NDArray[np.int8], NDArray[np.int32], Bools]:
    kinds, places, joined, is_inside = [], [], [], False
    for token in text.split():
        match = _TOKEN.fullmatch(token)
        assert match is not None, f"not a valid move: {token!r}"
        kinds.append(_KINDS[match[2]])
        places.append(int(match[3]))
        joined.append(is_inside)
        is_inside = (is_inside or match[1] is not None) and match[4] is None
    return np.array(kinds, np.int8), np.array(places, np.int32), np.array(joined, np.bool_)


def assemble(
    name: str,
    ranks: Sequence[Moves],
    placement: Placement,
    microbatches: int,
    dataflow: Dataflow | None = None,
) -> Schedule:
    """Return the schedule in which every rank makes its moves."""
    moves = join(ranks)
    lengths = [len(rank) for rank in ranks]
    rows = Rows.from_moves(lengths, moves.kind, moves.stage, moves.microbatch, moves.joined)
    flow = Dataflow.chain(placement.num_stages) if dataflow is None else dataflow
    return Schedule(rows, placement, flow, microbatches, name)
