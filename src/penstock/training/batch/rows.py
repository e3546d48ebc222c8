"""The rows of each microbatch, from all arguments of all ranks.

Tensors that are split decide first; else the ready-made items of the target, else those of the
arguments if they agree. If nothing is known, every microbatch counts the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import BatchError
from penstock.step.microbatches import count_rows, item_rows, ready_parts, share_out

__all__ = [
    "BatchRows",
    "ReadyRows",
    "RowClaims",
    "SplitRows",
    "claim_rows",
    "merge_claims",
    "settle_rows",
]

# What the target is called among the arguments of a step.
_TARGET = "target"


@dataclass(frozen=True, slots=True)
class SplitRows:
    """An argument with tensors that are split, and the number of their rows."""

    name: str
    total: int


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """A ready-made argument, and the rows of each item, None for one without rows."""

    name: str
    rows: tuple[int | None, ...]
    is_target: bool = False


@dataclass(frozen=True, slots=True)
class RowClaims:
    """The rows according to the arguments of one rank, or of several."""

    microbatches: int
    split: tuple[SplitRows, ...]
    ready: tuple[ReadyRows, ...]

    @classmethod
    def of_plain(cls, plain: Sequence[Any]) -> "RowClaims":
        """Return the claims that another rank has sent as plain values."""
        microbatches, split, ready = plain
        return cls(
            microbatches,
            tuple(SplitRows(*one) for one in split),
            tuple(ReadyRows(name, tuple(rows), is_target) for name, rows, is_target in ready),
        )


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of each microbatch; `doubt` says why they may not be what a loss is a mean over."""

    rows: list[int]
    doubt: str | None = None


def claim_rows(named: Mapping[str, Any], microbatches: int) -> RowClaims:
    """Return what the arguments of a step, with the target by its name, say of its rows."""
    totals = [(name, count_rows(value)) for name, value in named.items()]
    return RowClaims(
        microbatches,
        tuple(SplitRows(name, total) for name, total in totals if total is not None),
        tuple(_find_ready(named)),
    )


def _find_ready(named: Mapping[str, Any]) -> Iterator[ReadyRows]:
    for name, value in named.items():
        for ready, dim in ready_parts(value):
            rows = tuple(item_rows(item, dim) for item in ready.items)
            yield ReadyRows(name, rows, name == _TARGET)


def merge_claims(everyone: Sequence[RowClaims]) -> RowClaims:
    """Return what all ranks say together; refuse different numbers of microbatches."""
    counts = {rank: claims.microbatches for rank, claims in enumerate(everyone) if claims.split}
    for rank, count in counts.items():
        first = next(iter(counts))
        if count != counts[first]:
            raise BatchError(
                "all ranks must split the batch into the same number of microbatches (rank "
                f"{first} has {counts[first]}, rank {rank} has {count})"
            )
    named = list(everyone)
    if len(everyone) > 1:
        named = [_add_rank(rank, claims) for rank, claims in enumerate(everyone)]
    return RowClaims(
        next(iter(counts.values()), everyone[0].microbatches),
        tuple(one for claims in named for one in claims.split),
        tuple(one for claims in named for one in claims.ready),
    )


def _add_rank(rank: int, claims: RowClaims) -> RowClaims:
    """Return the claims with the rank in the names of the arguments."""
    return replace(
        claims,
        split=tuple(replace(one, name=f"rank {rank}: {one.name}") for one in claims.split),
        ready=tuple(replace(one, name=f"rank {rank}: {one.name}") for one in claims.ready),
    )


def settle_rows(claims: RowClaims) -> BatchRows | None:
    """Return the rows of each microbatch, or None if no argument says how many there are."""
    count = _settle_count(claims)
    if count is None:
        return None
    rows = _settle_split(claims, count)
    by_target = [r for r in _known_rows(claims, count) if r.is_target]
    if rows is None:
        return _settle_ready(by_target or _known_rows(claims, count), count)
    different = [list(r.rows) for r in by_target if not _is_proportional(r.rows, rows)]
    doubt = f"the batch has {rows} rows, the target {different[0]}" if different else None
    return BatchRows(rows, doubt)


def _settle_count(claims: RowClaims) -> int | None:
    if claims.ready:
        first, *others = claims.ready
        for other in others:
            if len(other.rows) != len(first.rows):
                raise BatchError(
                    f"all arguments must have the same number of ready-made microbatches "
                    f"({first.name} has {len(first.rows)}, {other.name} has {len(other.rows)})"
                )
        if not first.rows:
            raise BatchError(f"{first.name} must have at least one ready-made microbatch (got 0)")
        return len(first.rows)
    if claims.split:
        return min(claims.microbatches, max(claims.split[0].total, 1))
    return None


def _settle_split(claims: RowClaims, count: int) -> list[int] | None:
    """Return the rows of tensors that are split."""
    if not claims.split:
        return None
    first, *others = claims.split
    for other in others:
        if other.total != first.total:
            raise BatchError(
                f"all arguments that are split must have the same number of rows ({first.name} "
                f"has {first.total}, {other.name} has {other.total}); wrap what is not split by "
                "rows in Shared, Along or Ready"
            )
    if first.total == 0:
        raise BatchError(f"{first.name} must have at least one row (got 0)")
    if first.total < count:
        raise BatchError(
            f"{first.name} must have at least one row for each of the {count} ready-made "
            f"microbatches (got {first.total})"
        )
    return share_out(first.total, count)


def _settle_ready(known: Sequence[ReadyRows], count: int) -> BatchRows:
    """Return the rows that ready-made items agree on; else count every microbatch the same."""
    different = list(dict.fromkeys(ready.rows for ready in known))
    if len(different) == 1:
        return BatchRows([rows or 0 for rows in different[0]])
    shown = ", ".join(f"{ready.name} {list(ready.rows)}" for ready in known)
    return BatchRows([1] * count, f"the ready-made rows differ: {shown}" if different else None)


def _known_rows(claims: RowClaims, count: int) -> list[ReadyRows]:
    """Return the ready-made arguments whose items have rows, at least one of them some."""
    return [r for r in claims.ready if None not in r.rows and r.rows != (0,) * count]


def _is_proportional(rows: Sequence[int | None], others: Sequence[int]) -> bool:
    total, total_of_others = sum(row or 0 for row in rows), sum(others)
    pairs = zip(rows, others, strict=True)
    return all((row or 0) * total_of_others == other * total for row, other in pairs)
