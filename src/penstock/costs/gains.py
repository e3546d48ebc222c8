"""What overlapped actions save: one share for all pairs, or one for each pair of kinds.

A pair takes the sum of both less its gain times the shorter one. So 0 runs one after the other,
and 1 hides the shorter one.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

import numpy as np

from penstock.costs.numbers import freeze
from penstock.errors import CostsError
from penstock.ir.actions import COMPUTE_KINDS, Kind
from penstock.ir.rows import Floats, Rows
from penstock.untrusted import quote

__all__ = ["Gains", "freeze_gains", "gain_of_rows", "name_pair", "shares_to_shorten"]

# One share, or the share of each pair that has one, by names such as "F+B".
Gains: TypeAlias = float | Mapping[str, float] | Sequence[tuple[str, float]]

_BY_TEXT = {kind.text: kind for kind in COMPUTE_KINDS}


def name_pair(one: Kind, other: Kind) -> str:
    """Return the name of a pair of kinds, whichever comes first.

    >>> name_pair(Kind.FULL_BACKWARD, Kind.FORWARD)
    'F+B'
    """
    return "+".join(kind.text for kind in sorted((one, other), key=COMPUTE_KINDS.index))


def freeze_gains(value: object) -> float | tuple[tuple[str, float], ...]:
    """Check one share, or a share for each named pair; return pairs in one order."""
    if isinstance(value, Mapping):
        given = list(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        given = [tuple(pair) for pair in value]
    else:
        return _share("overlap_gain", value)
    found = {}
    for name, share in given:
        found[name_pair(*_read_pair(name))] = _share(f"overlap_gain of {name}", share)
    return tuple(sorted((name, share) for name, share in found.items() if share)) or 0.0


def _share(name: str, value: object) -> float:
    share = freeze(name, value, is_single=True)
    assert isinstance(share, float), "it is a single number"
    if share > 1:
        raise CostsError(f"{name} must be between 0 and 1 (got {share})")
    return share


def _read_pair(name: object) -> tuple[Kind, Kind]:
    kinds = [_BY_TEXT.get(part) for part in str(name).split("+")]
    if len(kinds) != 2 or kinds[0] is None or kinds[1] is None:
        known = ", ".join(_BY_TEXT)
        raise CostsError(
            f"overlap_gain is for pairs of {known} (got {quote(name)}); write 'F+B' for example"
        )
    return kinds[0], kinds[1]


def _table(gains: Gains) -> Floats:
    """Return the gain of every kind with every kind; those that are not named gain nothing."""
    if isinstance(gains, float):
        return np.full((len(Kind), len(Kind)), gains)
    table = np.zeros((len(Kind), len(Kind)))
    for name, share in dict(gains).items():
        one, other = _read_pair(name)
        table[one, other] = table[other, one] = share
    return table


def gain_of_rows(gains: Gains, rows: Rows) -> Floats:
    """Return, per row, the gain of the overlap that it is part of: of more than two, the least."""
    table, opens = _table(gains), np.flatnonzero(~rows.joined)
    size = np.diff(np.append(opens, len(rows)))
    least = np.zeros(len(opens))
    pairs = np.flatnonzero(size == 2)
    least[pairs] = table[rows.kind[opens[pairs]], rows.kind[opens[pairs] + 1]]
    for group in np.flatnonzero(size > 2).tolist():
        kinds = rows.kind[opens[group] : opens[group] + size[group]].tolist()
        least[group] = min(table[one, other] for one, other in combinations(kinds, 2))
    gain: Floats = np.repeat(least, size)
    return gain


def shares_to_shorten(gains: Gains) -> list[dict[Kind, float]]:
    """Return ways to make all kinds shorter, so that no pair saves more than both members do.

    The members of a pair share its gain evenly, or F has it whole and others have it evenly.
    """
    table = _table(gains)[np.ix_(COMPUTE_KINDS, COMPUTE_KINDS)]
    forward = COMPUTE_KINDS.index(Kind.FORWARD)
    others = np.delete(table, forward, axis=1).max(axis=1) / 2
    others[forward] = table[forward].max()
    ways = (table.max(axis=1) / 2, others)
    return [dict(zip(COMPUTE_KINDS, way.tolist(), strict=True)) for way in ways]
