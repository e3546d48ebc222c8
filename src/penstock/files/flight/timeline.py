"""The last step in flight records as a timeline: what was done of it, and when.

rank 0  F0 F1 .........           an action that was running is drawn for as long as its rank
rank 1  .. F0 F1 B0 ...           gave signs of life; one that still waited for a message had
rank 2  .. .. F0 F1====           not begun, and is not drawn
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.files.flight.log import Doing, FlightLog, FlightRecord, Phase
from penstock.files.flight.waits import Flight
from penstock.ir.actions import Action, Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.rows import Rows, is_compute
from penstock.ir.schedule import Schedule
from penstock.sim.timeline import Timeline

__all__ = ["RecordedStep", "last_recorded_step"]

# Running actions are drawn beyond the last end by this share of the time until then.
_MARGIN = 0.25
_BACKWARDS = (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A step as far as it was recorded; its timeline begins with its first action.

    A rank without a known action has one of length 0 at the end.
    """

    step: int
    timeline: Timeline
    unfinished: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class _Bar:
    action: Action
    start: float
    end: float
    is_finished: bool


def last_recorded_step(flight: Flight) -> RecordedStep | None:
    """Return the last step in which any rank computed, if there is one."""
    steps = [step for log in flight.logs.values() for step in _last_computed(log)]
    if not steps:
        return None
    step = max(steps)
    records = {rank: _last_attempt(log.of_step(step)) for rank, log in flight.logs.items()}
    end = _end_of_picture(flight, [r for of_rank in records.values() for r in of_rank])
    bars = {rank: _bars(of_rank, end) for rank, of_rank in records.items()}
    everything = [bar for of_rank in bars.values() for bar in of_rank]
    holder = flight.placement.rank_of_stage
    lanes = [_lane(bars.get(r, ()), holder.index(r), end) for r in range(flight.num_ranks)]
    unfinished = tuple(bar.action for bar in everything if not bar.is_finished)
    edges = {edge for of_rank in records.values() for r in of_rank for edge in _edges(r.doing)}
    edges |= {(stage, stage + 1) for stage in range(flight.placement.num_stages - 1)}
    return RecordedStep(step, _timeline(flight, step, lanes, edges), unfinished)


def _last_computed(log: FlightLog) -> list[int]:
    """Return the last step in which a rank computed, if any."""
    table = log.table
    has_begun = (table["since"] == 0) | (table["ready"] != 0)
    is_work = is_compute(table["doing"]["kind"]) & has_begun
    steps: list[int] = table["step"][is_work][-1:].tolist()
    return steps


def _last_attempt(records: Sequence[FlightRecord]) -> list[FlightRecord]:
    """Return the newest records of a step, back to where an action would repeat."""
    kept: dict[Doing, FlightRecord] = {}
    for record in reversed(records):
        if record.doing in kept:
            break
        kept[record.doing] = record
    return list(reversed(kept.values()))


def _end_of_picture(flight: Flight, records: Sequence[FlightRecord]) -> float:
    """Return the time at which running actions are cut off."""
    last = max(r.start if r.end is None else r.end for r in records)
    if all(record.end is not None for record in records):
        return last
    first = min(record.start for record in records)
    return min(flight.end, last + _MARGIN * (last - first)) if last > first else flight.end


def _bars(records: Sequence[FlightRecord], end: float) -> list[_Bar]:
    """Return the actions that occupied a rank, without those that still waited."""
    bars = []
    for number, record in enumerate(records):
        action, start = record.doing, record.start if record.ready is None else record.ready
        if isinstance(action, Phase) or action.kind.is_communication or record.is_waiting:
            continue
        if record.end is not None:
            bars.append(_Bar(action, start, record.end, True))
            continue
        # It failed if others follow it.
        following = records[number + 1 : number + 2]
        until = following[0].start if following else end
        bars.append(_Bar(action, start, max(start, until), False))
    return _after_their_needs(bars)


def _after_their_needs(bars: list[_Bar]) -> list[_Bar]:
    """Leave out backwards whose forwards are no longer in the record."""
    seen: set[Action] = set()
    kept = []
    for bar in bars:
        if not (needs := _own_needs(bar.action)) or needs & seen:
            kept.append(bar)
            seen.add(bar.action)
    return kept


def _own_needs(action: Action) -> set[Action]:
    """Return the actions of its own stage of which a backward needs one."""
    match action.kind:
        case Kind.FULL_BACKWARD | Kind.BACKWARD_INPUT:
            return {replace(action, kind=Kind.FORWARD)}
        case Kind.BACKWARD_WEIGHT:
            return {replace(action, kind=kind) for kind in _BACKWARDS}
        case _:
            return set()


def _lane(bars: Sequence[_Bar], first_stage: int, end: float) -> list[_Bar]:
    """Return a rank's bars; if it never computed, with a forward of length 0."""
    if any(bar.action.kind.is_compute for bar in bars):
        return [*bars]
    return [*bars, _Bar(Action(Kind.FORWARD, first_stage, 0), end, end, True)]


def _edges(doing: Doing) -> list[tuple[int, int]]:
    """Return the edge of the dataflow along which a message goes."""
    if not isinstance(doing, Action) or doing.peer is None:
        return []
    return [(min(doing.stage, doing.peer), max(doing.stage, doing.peer))]


def _timeline(
    flight: Flight, step: int, lanes: Sequence[Sequence[_Bar]], edges: set[tuple[int, int]]
) -> Timeline:
    bars = [bar for lane in lanes for bar in lane]
    begin = min(bar.start for bar in bars)
    known = _known_edges(bars, edges)
    schedule = Schedule(
        Rows.from_works([[bar.action for bar in lane] for lane in lanes]),
        flight.placement,
        Dataflow(flight.placement.num_stages, sorted(known)),
        max(bar.action.microbatch or 0 for bar in bars) + 1,
        f"{flight.schedule}, step {step}",
    )
    start, end = (np.array([getattr(bar, name) for bar in bars]) for name in ("start", "end"))
    return Timeline(schedule, start - begin, end - begin, np.zeros(len(bars)))


def _known_edges(bars: Sequence[_Bar], edges: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the edges for which all needs of the actions at their ends are known."""
    forwards, backwards = _microbatches(bars, (Kind.FORWARD,)), _microbatches(bars, _BACKWARDS)
    return {
        (producer, consumer)
        for producer, consumer in edges
        if forwards[consumer] <= forwards[producer] and backwards[producer] <= backwards[consumer]
    }


def _microbatches(bars: Sequence[_Bar], kinds: Sequence[Kind]) -> defaultdict[int, set[int]]:
    """Return, by stage, the microbatches that are in actions of these kinds."""
    found = defaultdict[int, set[int]](set)
    for bar in bars:
        if bar.action.kind in kinds and bar.action.microbatch is not None:
            found[bar.action.stage].add(bar.action.microbatch)
    return found
