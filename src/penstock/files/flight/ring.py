"""The ring of a flight record: its records in order, checked for consistency."""

import numpy as np

from penstock.errors import ParseError
from penstock.files.flight.layout import LATEST, MOST_MICROBATCHES
from penstock.files.flight.log import Phase, RecordTable
from penstock.ir.actions import Kind
from penstock.ir.rows import ABSENT, Bools

__all__ = ["check", "in_order"]

_COMMUNICATION = [kind for kind in Kind if kind.is_communication]
_WITHOUT_MICROBATCH = [kind for kind in Kind if not kind.has_microbatch]


def in_order(ring: RecordTable) -> RecordTable:
    """Return the records oldest first, without the place of the next one."""
    newest = int(ring["number"].max())
    if newest > 2**62:
        raise ParseError(f"{newest} is not a valid record number")
    numbers = np.arange(newest - len(ring) + 2, newest + 1)
    table = ring[(numbers - 1) % len(ring)]
    if (wrong := np.flatnonzero(table["number"] != np.maximum(numbers, 0))).size:
        number, found = int(numbers[wrong[0]]), int(table["number"][wrong[0]])
        raise ParseError(f"record {found} is in the place of record {max(number, 0)}")
    kept = table[numbers > 0]
    _mend(kept[-1:])
    return kept


def _mend(last: RecordTable) -> None:
    """Drop impossible times from the newest record: they were not written in full."""
    since, ready, end = (last[name] for name in ("since", "ready", "end"))
    since[~((since >= last["start"]) & (since < LATEST))] = 0
    ready[~((ready >= since) & (ready < LATEST) & (since > 0))] = 0
    end[~((end >= last["start"]) & (end < LATEST))] = 0


def check(table: RecordTable, own: Bools) -> None:
    """Raise an error for the first record that this rank cannot have written."""
    start, since, ready, end = (table[name] for name in ("start", "since", "ready", "end"))
    waited, kind = since != 0, table["doing"]["kind"]
    is_phase = np.isin(kind, list(Phase))
    is_fine = {
        "step": table["step"] >= 0,
        "start": (start > 0) & (start < LATEST),
        "action": is_phase | _is_action(table["doing"], own),
        "awaited message": ~waited
        | (_is_action(table["awaited"], own) & np.isin(table["awaited"]["kind"], _COMMUNICATION)),
        "wait": ~waited | ((since >= start) & (since < LATEST)),
        "arrival": (ready == 0) | (waited & (ready >= since) & (ready < LATEST)),
        "end": (end == 0) | ((end >= np.maximum(start, ready)) & (end < LATEST)),
    }
    is_fine["order"] = np.ones(len(table), dtype=np.bool_)
    is_fine["order"][1:] = start[1:] >= np.maximum(start, end)[:-1]
    for name, fine in is_fine.items():
        if (wrong := np.flatnonzero(~fine)).size:
            number = int(table["number"][wrong[0]])
            raise ParseError(f"the {name} of record {number} is impossible")


def _is_action(column: RecordTable, own: Bools) -> Bools:
    """Return, for each item, whether it is an action of a stage that this rank holds."""
    kind, stage, microbatch, peer = (
        column[name] for name in ("kind", "stage", "microbatch", "peer")
    )
    stages = len(own)
    is_there = (stage >= 0) & (stage < stages)
    has_no_microbatch = np.isin(kind, _WITHOUT_MICROBATCH)
    is_counted = (microbatch >= 0) & (microbatch < MOST_MICROBATCHES)
    has_peer = np.isin(kind, _COMMUNICATION)
    is_action: Bools = (
        (kind >= 0)
        & (kind < len(Kind))
        & is_there
        & own[np.where(is_there, stage, 0)]
        & np.where(has_no_microbatch, microbatch == ABSENT, is_counted)
        & np.where(has_peer, (peer >= 0) & (peer < stages), peer == ABSENT)
    )
    return is_action
