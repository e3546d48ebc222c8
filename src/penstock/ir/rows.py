"""Every rank's work as columns of numbers, so that passes and checks run at array speed.

row          0    1    2    3    4        first = [0, 3, 5]: rank 0 owns rows 0-2,
rank         0    0    0    1    1                           rank 1 owns rows 3-4
kind         F    F    B    F    B
stage        0    0    0    1    1
microbatch   0    1    0    0    0
peer         -    -    -    -    -        the other stage of a communication
joined       no   no   yes  no   no       row 2 runs together with row 1: an overlap
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import COMPUTE_KINDS, Action, Kind, Overlap, Work

__all__ = [
    "ABSENT",
    "HELD_CHANGE",
    "Bools",
    "Floats",
    "Ints",
    "Rows",
    "insert_rows",
    "is_compute",
]

Ints = NDArray[np.int64] | NDArray[np.int32] | NDArray[np.int8]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

# The code for "no microbatch" and "no peer" in the columns.
ABSENT = -1

# By kind, the change in the number of stage activations that a rank holds: an activation is held
# from its F to its B or, where the backward is split, to its W. One that is recomputed is held
# from its RECOMPUTE on, and none is while it is offloaded.
HELD_CHANGE = np.zeros(len(Kind), dtype=np.int64)
HELD_CHANGE[[Kind.FORWARD, Kind.RECOMPUTE, Kind.RELOAD]] = 1
HELD_CHANGE[[Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT, Kind.OFFLOAD]] = -1
HELD_CHANGE.flags.writeable = False


@dataclass(frozen=True, eq=False)
class Rows:
    """The columns; `first[r]` to `first[r + 1]` are the rows of rank r, in its order.

    Without slots, so that `count_of_kind` is kept: passes and checks ask for it again and again.
    """

    first: NDArray[np.int64]
    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    peer: NDArray[np.int32]
    joined: Bools

    def __post_init__(self) -> None:
        for column in (self.first, *self.columns):
            column.flags.writeable = False

    @property
    def columns(self) -> tuple[NDArray[np.generic], ...]:
        """The columns in the order of the fields, without `first`."""
        return (self.kind, self.stage, self.microbatch, self.peer, self.joined)

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def count_of_kind(self) -> NDArray[np.int64]:
        """For every kind, the number of its rows."""
        return np.bincount(self.kind, minlength=len(Kind))

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.first) - 1

    @classmethod
    def from_works(cls, orders: Sequence[Sequence[Work]]) -> "Rows":
        """Return the rows of every rank's list of actions and overlaps."""
        cells = [cell for order in orders for work in order for cell in _encode(work)]
        lengths = [sum(_width(work) for work in order) for order in orders]
        columns = np.array(cells, dtype=np.int32).reshape(len(cells), 5).T
        return cls(
            first=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
            kind=columns[0].astype(np.int8),
            stage=columns[1].copy(),
            microbatch=columns[2].copy(),
            peer=columns[3].copy(),
            joined=columns[4].astype(np.bool_),
        )

    @classmethod
    def from_moves(
        cls,
        lengths: Sequence[int],
        kind: Ints,
        stage: Ints,
        microbatch: Ints,
        joined: Bools,
    ) -> "Rows":
        """Return the rows of a compute-only schedule from its columns, rank after rank."""
        return cls(
            first=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
            kind=kind.astype(np.int8),
            stage=stage.astype(np.int32),
            microbatch=microbatch.astype(np.int32),
            peer=np.full(len(kind), ABSENT, dtype=np.int32),
            joined=joined,
        )

    def rank_of_row(self) -> NDArray[np.int32]:
        """Return the rank of every row."""
        ranks = np.arange(self.num_ranks, dtype=np.int32)
        return np.repeat(ranks, np.diff(self.first))

    def is_kind(self, *kinds: Kind) -> Bools:
        """Return, for every row, whether it is of one of these kinds."""
        # A plain number takes the type of the column; a Kind would make NumPy widen the column.
        found: Bools = self.kind == int(kinds[0])
        for kind in kinds[1:]:
            found |= self.kind == int(kind)
        return found

    @property
    def is_compute(self) -> Bools:
        """For every row, whether it runs the model."""
        return is_compute(self.kind)

    @property
    def held_change(self) -> NDArray[np.int64]:
        """For every row, the change in the number of stage activations that its rank holds."""
        change = HELD_CHANGE[self.kind]
        if self.has_kind(Kind.RECOMPUTE):
            change[self.saves_inputs_only()] = 0
        return change

    @property
    def has_memory_actions(self) -> bool:
        """Whether anything that a forward saves is recomputed or offloaded."""
        return bool(self.count_of_kind[Kind.RECOMPUTE :].any())

    def saves_inputs_only(self) -> Bools:
        """Return, for every row, whether it is a forward that a RECOMPUTE runs again.

        Such a forward holds nothing but its inputs.
        """
        found = np.zeros(len(self), dtype=np.bool_)
        if self.has_kind(Kind.RECOMPUTE):
            again = self.is_kind(Kind.RECOMPUTE)
            size = int(self.microbatch.max()) + 1
            key = self.stage.astype(np.int64) * size + self.microbatch
            found = self.is_kind(Kind.FORWARD) & np.isin(key, key[again])
        return found

    def has_kind(self, *kinds: Kind) -> bool:
        """Return whether any row is of one of these kinds."""
        return bool(self.count_of_kind[list(kinds)].any())

    def in_overlap(self) -> Bools:
        """Return, for every row, whether it runs together with the row before or after it."""
        together = self.joined.copy()
        together[:-1] |= self.joined[1:]
        return together

    def opening_row(self) -> NDArray[np.int64]:
        """Return, for every row, the first row of the piece of work that it belongs to."""
        return np.maximum.accumulate(np.where(self.joined, 0, np.arange(len(self))))

    def take(self, index: NDArray[np.int64], first: NDArray[np.int64]) -> "Rows":
        """Return some of these rows in another order; `first` bounds the ranks."""
        return Rows(
            first,
            self.kind[index],
            self.stage[index],
            self.microbatch[index],
            self.peer[index],
            self.joined[index],
        )

    def keep(self, wanted: Bools) -> "Rows":
        """Return the rows for which `wanted` holds, each on its rank."""
        kept = np.concatenate(([0], np.cumsum(wanted, dtype=np.int64)))
        return self.take(np.flatnonzero(wanted), kept[self.first])

    def action(self, row: int) -> Action:
        """Return the action in one row, overlapped or not."""
        return _decode(*(int(column[row]) for column in self.columns[:4]))

    def of_rank(self, rank: int) -> range:
        """Return the numbers of a rank's rows."""
        return range(int(self.first[rank]), int(self.first[rank + 1]))

    def works(self, rank: int, start: int = 0, stop: int | None = None) -> Iterator[Work]:
        """Return the works in a rank's rows `start` to `stop`, counted from its first row."""
        last = self.first[rank + 1] if stop is None else self.first[rank] + stop
        bounds = slice(int(self.first[rank]) + start, int(last))
        group: list[Action] = []
        *numbers, joined = (column[bounds].tolist() for column in self.columns)
        for *cell, is_joined in zip(*numbers, joined, strict=True):
            if group and not is_joined:
                yield _work(group)
                group = []
            group.append(_decode(*cell))
        if group:
            yield _work(group)

    def rank(self, row: int) -> int:
        """Return the rank of one row."""
        return int(np.searchsorted(self.first, row, side="right")) - 1

    def position(self, row: int) -> tuple[int, int]:
        """Return a row's rank and its position in the rank's list; an overlap is one position."""
        rank = self.rank(row)
        before = self.joined[int(self.first[rank]) + 1 : row + 1]
        return rank, len(before) - int(before.sum())


def is_compute(kind: Ints) -> Bools:
    """Return, for every entry of a column of kinds, whether it runs the model."""
    found: Bools = kind <= int(COMPUTE_KINDS[-1])
    return found


def insert_rows(rows: Rows, before: NDArray[np.int64], new: Rows) -> Rows:
    """Return `rows` with the rows of `new` inserted, each before row `before[i]` of its rank.

    `before` must not decrease within a rank, and may point one past the last row of a rank; rows
    for the same place keep their order.
    """
    total = len(rows) + len(new)
    is_new = np.zeros(total, dtype=np.bool_)
    is_new[before + np.arange(len(before))] = True
    is_old = ~is_new

    def merge(old: NDArray[np.generic], added: NDArray[np.generic]) -> NDArray[np.generic]:
        column = np.empty(total, dtype=old.dtype)
        column[is_old] = old
        column[is_new] = added
        return column

    columns = map(merge, rows.columns, new.columns)
    return Rows(rows.first + new.first, *columns)  # type: ignore[arg-type]  # dtypes are kept


def _width(work: Work) -> int:
    return len(work.actions) if isinstance(work, Overlap) else 1


def _encode(work: Work) -> Iterator[tuple[int, int, int, int, int]]:
    actions = work.actions if isinstance(work, Overlap) else (work,)
    for place, action in enumerate(actions):
        microbatch = ABSENT if action.microbatch is None else action.microbatch
        peer = ABSENT if action.peer is None else action.peer
        yield action.kind, action.stage, microbatch, peer, place > 0


def _decode(kind: int, stage: int, microbatch: int, peer: int) -> Action:
    return Action(
        Kind(kind),
        stage,
        None if microbatch == ABSENT else microbatch,
        None if peer == ABSENT else peer,
    )


def _work(group: list[Action]) -> Work:
    return group[0] if len(group) == 1 else Overlap(tuple(group))
