"""Lists of torch's actions as the columns of a schedule, and back.

Lists are long, so they reach the passes without action objects of our own in between.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.dropin.names.actions import (
    KIND_OF_TYPE,
    TYPE_OF_KIND,
    WAITS,
    _Action,
    overlap,
    to_work,
)
from penstock.ir.actions import Kind, chain_peer
from penstock.ir.rows import ABSENT, Rows

__all__ = ["to_actions", "to_rows"]

_TYPES = [TYPE_OF_KIND[kind] for kind in Kind]
_TALKS = np.array([kind.is_communication for kind in Kind])
_PEER_OF_STAGE_0 = np.array([chain_peer(kind, 0) for kind in Kind])


def to_rows(
    lists: Sequence[Sequence[_Action | None]], idle_stages: Sequence[int] | None = None
) -> Rows:
    """Return the rows of every rank's list, without waits for sends: the transport has its own.

    An idle slot becomes a RESHARD of the stage that `idle_stages` has for its rank, or is left
    out where there are no such stages.
    """
    cells: list[tuple[int, int, int, bool]] = []
    ends = [0]
    for rank, actions in enumerate(lists):
        for action in actions:
            if action is None:
                if idle_stages is not None:
                    cells.append((Kind.RESHARD, idle_stages[rank], ABSENT, False))
            elif action.computation_type not in WAITS:
                cells += _encode(action)
        ends.append(len(cells))
    columns = np.array(cells, dtype=np.int32).reshape(len(cells), 4).T
    kind, stage, microbatch = columns[0].astype(np.int8), columns[1].copy(), columns[2].copy()
    peer = np.where(_TALKS[kind], stage + _PEER_OF_STAGE_0[kind], ABSENT).astype(np.int32)
    joined = columns[3].astype(np.bool_)
    return Rows(np.array(ends, dtype=np.int64), kind, stage, microbatch, peer, joined)


def to_actions(rows: Rows, rank: int) -> Iterator[_Action]:
    """Yield one rank's rows as actions."""
    here = slice(int(rows.first[rank]), int(rows.first[rank + 1]))
    columns = (rows.kind, rows.stage, rows.microbatch, rows.joined)
    group: list[_Action] = []
    for kind, stage, microbatch, joined in zip(*(c[here].tolist() for c in columns), strict=True):
        if group and not joined:
            yield group[0] if len(group) == 1 else overlap(group)
            group = []
        group.append(_Action(stage, _TYPES[kind], None if microbatch == ABSENT else microbatch))
    if group:
        yield group[0] if len(group) == 1 else overlap(group)


def _encode(action: _Action, joined: bool = False) -> list[tuple[int, int, int, bool]]:
    """Return the cells of an action; `to_work` refuses one without meaning."""
    stage, computation_type, microbatch, sub_actions = action
    if sub_actions is not None:
        to_work(action)
        members = enumerate(sub_actions)
        return [cell for place, member in members for cell in _encode(member, place > 0)]
    kind = KIND_OF_TYPE.get(computation_type)
    number = ABSENT if microbatch is None else microbatch
    if kind is None or stage < 0 or (number < 0) == kind.has_microbatch:
        to_work(action)
    assert kind is not None
    return [(kind, stage, number, joined)]
