"""Compute that messages slow down: actions that ran beside messages, compared with others.

    rank 1   |  1F0  |    1F1    |  1F2  |      1F1 ran while a receive was pending: it took longer
    receive          |-----------|

A rank has a receive pending from its start until the message is there, and a send from its start
until the message has arrived at the other rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.actions import COMPUTE_KINDS, Kind
from penstock.ir.lookup import find_rows
from penstock.ir.rows import ABSENT, Bools, Floats
from penstock.sim.timeline import Timeline

__all__ = ["Slowdown", "find_slowdowns"]

Messages: TypeAlias = Literal["receives", "sends", "messages"]

# An action ran beside messages if some were pending for this share of it, and alone below that.
_BESIDE = 0.5
_ALONE = 0.05
# With fewer actions of each, or below this ratio, the difference may be chance.
_FEWEST = 3
_NOTABLE = 1.1


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Actions of one kind and stage that took longer beside messages: the median of each.

    `messages` are what was pending: receives, sends, or both.
    """

    rank: int
    stage: int
    kind: Kind
    messages: Messages
    beside_seconds: float
    alone_seconds: float

    @property
    def ratio(self) -> float:
        """The seconds beside messages as a multiple of those without."""
        return self.beside_seconds / self.alone_seconds


def find_slowdowns(timeline: Timeline, *more: Timeline) -> tuple[Slowdown, ...]:
    """Find the kinds of compute that took notably longer while messages were pending.

    Several recorded steps of one schedule give more to compare than one. Kinds that never ran
    without messages, or never beside them, are left out. The largest ratio comes first.
    """
    steps = (timeline, *more)
    if any(step.schedule != timeline.schedule for step in more):
        raise ScheduleError(
            "the timelines must be of one schedule (got several); examine each by itself"
        )
    if not timeline.schedule.has_communication:
        return ()
    rows = timeline.schedule.rows
    received, sent, either = (
        np.concatenate([_shares(step, wanted) for step in steps])
        for wanted in ("receives", "sends", "messages")
    )
    seconds = np.concatenate([step.end - step.start for step in steps])
    is_single = np.tile(_is_single(timeline), len(steps))
    stages, kinds = np.tile(rows.stage, len(steps)), np.tile(rows.kind, len(steps))
    found = []
    for stage, rank in enumerate(timeline.schedule.placement.rank_of_stage):
        for kind in COMPUTE_KINDS:
            mine = is_single & (stages == stage) & (kinds == kind)
            beside, alone = mine & (either >= _BESIDE), mine & (either <= _ALONE)
            if _is_notable(seconds[beside], seconds[alone]):
                messages = _name(received[beside], sent[beside])
                medians = float(np.median(seconds[beside])), float(np.median(seconds[alone]))
                found.append(Slowdown(rank, stage, kind, messages, *medians))
    return tuple(sorted(found, key=lambda slowdown: -slowdown.ratio))


def _is_single(timeline: Timeline) -> Bools:
    """Return which rows are outside of overlaps, whose members share their time."""
    joined = timeline.schedule.rows.joined
    is_single: Bools = ~(joined | np.append(joined[1:], np.False_))
    return is_single


def _is_notable(beside: Floats, alone: Floats) -> bool:
    """Return whether most actions beside messages took longer than most of the others."""
    if min(len(beside), len(alone)) < _FEWEST or not np.median(alone) > 0:
        return False
    is_apart = np.quantile(beside, 0.25) > np.quantile(alone, 0.75)
    return bool(is_apart and np.median(beside) >= _NOTABLE * np.median(alone))


def _name(received: Floats, sent: Floats) -> Messages:
    """Return what was pending beside these actions, by the shares of each."""
    has_receives, has_sends = (bool((share >= _BESIDE).all()) for share in (received, sent))
    if has_receives == has_sends:
        return "messages"
    return "receives" if has_receives else "sends"


def _shares(timeline: Timeline, wanted: Messages) -> Floats:
    """Return the share of each row during which its rank had messages of this kind pending."""
    rows = timeline.schedule.rows
    shares = np.zeros(len(rows))
    pending: list[list[tuple[float, float]]] = [[] for _ in range(rows.num_ranks)]
    for rank, start, end in _pending(timeline, wanted):
        pending[rank].append((start, end))
    for spans, begin, end in zip(pending, rows.first[:-1], rows.first[1:], strict=True):
        edges, covered = _merge(sorted(spans))
        starts, ends = timeline.start[begin:end], timeline.end[begin:end]
        inside = np.interp(ends, edges, covered) - np.interp(starts, edges, covered)
        length = ends - starts
        shares[begin:end] = np.divide(inside, length, out=np.zeros(len(length)), where=length > 0)
    return shares


def _pending(timeline: Timeline, wanted: Messages) -> Iterator[tuple[int, float, float]]:
    """Yield the rank, start and end of each message that is pending on a rank."""
    rows, lookup = timeline.schedule.rows, find_rows(timeline.schedule)
    for sends, receives in (
        (lookup.send_forward, lookup.receive_forward),
        (lookup.send_backward, lookup.receive_backward),
    ):
        known = (sends != ABSENT) & (receives != ABSENT)
        for send, receive in zip(sends[known].tolist(), receives[known].tolist(), strict=True):
            arrival = float(timeline.end[receive])
            if wanted != "sends":
                yield rows.rank(receive), float(timeline.start[receive]), arrival
            if wanted != "receives":
                yield rows.rank(send), float(timeline.start[send]), arrival


def _merge(spans: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return times, and the seconds that spans cover until each of them; overlaps count once."""
    edges, covered, total = [0.0], [0.0], 0.0
    last = 0.0
    for start, end in spans:
        begin = max(start, last)
        if end > begin:
            edges += [begin, end]
            covered += [total, total + end - begin]
            total, last = total + end - begin, end
    return edges, covered
