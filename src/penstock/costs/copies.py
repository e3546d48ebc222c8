"""Copies between ranks and their hosts: in which order they run, after what, and for whom.

          rank        0F0 0F1     0OFFLOAD0 ...  0RELOAD0 0F5  0B0
device to host           |--0F0--|
host to device                                           |-0F0-|

Both directions run at the same time. Copies to the host run in the order of their forwards, and
copies back in the order in which their rank begins them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.costs.costs import Costs
from penstock.costs.pricing import scale_of_rows
from penstock.ir.actions import Kind
from penstock.ir.lookup import find_rows
from penstock.ir.rows import Floats, Ints
from penstock.ir.schedule import Schedule

__all__ = ["Copies", "find_copies"]


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """The copies of a rank in one direction, in their order, for the row of each.

    A copy can begin when the row `begins_after` has ended, and `awaited_by` waits for its end.
    """

    row: NDArray[np.int64]
    seconds: Floats
    begins_after: Ints
    awaited_by: Ints


def find_copies(schedule: Schedule, costs: Costs) -> Iterator[Copies]:
    """Yield the copies of every rank to its host, and those back, if any takes time."""
    rows, lookup = schedule.rows, find_rows(schedule)
    rank_of_row = rows.rank_of_row()
    speed = np.inf if costs.host_link is None else costs.host_link
    seconds = costs.per_stage("activation_bytes", schedule.num_stages)[rows.stage] / speed
    seconds = seconds * scale_of_rows(costs, schedule)
    for kind in (Kind.OFFLOAD, Kind.RELOAD):
        moved = np.flatnonzero(rows.is_kind(kind) & (seconds > 0))
        place = rows.stage[moved], rows.microbatch[moved]
        begins_after: Ints
        awaited_by: Ints
        if kind is Kind.OFFLOAD:
            begins_after, awaited_by = lookup.forward[place], moved
        else:
            begins_after, awaited_by = moved, lookup.backward_input[place]
        order = np.argsort(begins_after, kind="stable")
        for rank in np.unique(rank_of_row[moved]).tolist():
            mine = order[rank_of_row[moved[order]] == rank]
            row = moved[mine]
            yield Copies(row, seconds[row], begins_after[mine], awaited_by[mine])
