"""A timeline in which compute runs beside messages."""

import numpy as np

from penstock.ir.schedule import Schedule
from penstock.sim.timeline import Timeline

__all__ = ["timeline_of"]

_SCHEDULE = Schedule.from_orders(
    [
        [*(f"0F{m}" for m in range(6)), *(f"0SEND_F{m}" for m in range(6))],
        [*(f"1RECV_F{m}" for m in range(6)), *(f"1F{m}" for m in range(6))],
    ]
)


def timeline_of(
    seconds: list[float], received: list[tuple[float, float]], sent: float = 0.0
) -> Timeline:
    """Return a timeline in which the forwards of rank 1 take these seconds, one by one.

    Its receives take from when to when; all sends of rank 0 begin at `sent`.
    """
    ends = np.cumsum(seconds)
    first = np.arange(6.0)
    spans = [
        *zip(first, first + 1, strict=True),
        *[(sent, sent)] * 6,
        *received,
        *zip(ends - seconds, ends, strict=True),
    ]
    start, end = (np.array(column, dtype=np.float64) for column in zip(*spans, strict=True))
    return Timeline(_SCHEDULE, start, end, np.zeros(len(start)))
