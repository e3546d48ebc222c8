"""Steps recorded by torch's profiler: its ranges that are named like actions.

Every process is a rank. Where the profiler has recorded a device too, times are the device's: from
the start of a range's first kernel to the end of its last.

host     |0F0|0F1|0B0|            a range that started no kernel takes no time on the device:
device        |0F0   |0F1 |0B0 |  it is where the device was when the host reached it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import ArgumentError, ParseError
from penstock.files.trace.device_work import DeviceWork, find_stretches
from penstock.files.trace.events import Event
from penstock.files.trace.spans import ActionSpan, count_of, read_span
from penstock.ir.actions import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.ir.text import parse_work
from penstock.sim.timeline import Timeline

__all__ = ["Profile", "ProfiledProcess", "processes_of", "profiled_timeline"]

_RANGE = "user_annotation"
# What is added to every time of a file.
_BASE = "baseTimeNanoseconds"


@dataclass(slots=True)
class Profile:
    """The ranges of actions in a profiler's file, and their work on a device."""

    ranges: list[ActionSpan] = field(default_factory=list)
    work: DeviceWork = field(default_factory=DeviceWork)

    def add(self, event: Event) -> None:
        """Take an event; those that are neither are skipped."""
        if event.fields.get("ph") != "X":
            return
        if event.fields.get("cat") != _RANGE:
            self.work.add(event)
        elif _is_action(event.fields.get("name")):
            self.ranges.append(read_span(event))

    def __len__(self) -> int:
        return len(self.ranges) + len(self.work)


@dataclass(frozen=True, slots=True)
class _Ran:
    """An action and when it ran, in nanoseconds on the clock that all processes share."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ProfiledProcess:
    """The actions of one process in order, and its rank, if the file has it."""

    rank: int | None
    ran: tuple[_Ran, ...]


def _is_action(name: object) -> bool:
    """Return whether a range is an action; users have ranges of their own."""
    try:
        return isinstance(name, str) and isinstance(parse_work(name), Action)
    except ParseError:
        return False


def processes_of(fields: Mapping[str, Any], profile: Profile) -> list[ProfiledProcess]:
    """Return the processes of one file: one, or several where files were merged."""
    base = count_of({_BASE: 0, **fields}, _BASE)
    ranges: dict[int, list[ActionSpan]] = {}
    for span in sorted(profile.ranges, key=lambda span: (span.start, span.number)):
        ranges.setdefault(span.process, []).append(span)
    if not ranges:
        raise ParseError(
            "the trace has no actions; profile a step of a pipeline with the host's activities"
        )
    if len(ranges) > 1 and len(profile.work):
        raise ParseError(
            f"the trace has a device that {len(ranges)} processes share; "
            "give the files of the ranks before they were merged"
        )
    rank = _rank_of(fields) if len(ranges) == 1 else None
    return [
        ProfiledProcess(rank, _times(of_one, profile.work, base)) for of_one in ranges.values()
    ]


def _rank_of(fields: Mapping[str, Any]) -> int | None:
    """Return the rank that the profiler notes where a process group existed."""
    world = fields.get("distributedInfo")
    rank = world.get("rank") if isinstance(world, dict) else None
    return rank if isinstance(rank, int) else None


def _times(ranges: Sequence[ActionSpan], work: DeviceWork, base: int) -> tuple[_Ran, ...]:
    """Return one process's actions in their order, with the device's times if there are any."""
    starts, ends = (
        np.array([getattr(span, side) for span in ranges]) for side in ("start", "end")
    )
    if len(work):
        there = find_stretches(work, starts, ends)
        is_idle = there.start > there.end
        # Where the device was when the host reached a range without kernels.
        reached = np.maximum.accumulate(np.where(is_idle, starts, there.end))
        starts = np.where(is_idle, reached, there.start)
        ends = np.where(is_idle, reached, there.end)
    return tuple(
        _Ran(span.action, base + round(1000 * start), base + round(1000 * end))
        for span, start, end in zip(ranges, starts.tolist(), ends.tolist(), strict=True)
    )


def profiled_timeline(processes: Sequence[ProfiledProcess], *, name: str, step: int) -> Timeline:
    """Return one step of the processes, each as a rank.

    They are numbered by their ranks if all have one, else by the lowest stage that each runs.
    """
    ranks = _in_order(processes)
    steps = [_split_steps(process.ran) for process in ranks]
    counts = {len(found) for found in steps}
    if len(counts) > 1:
        raise ParseError(
            f"all processes must have as many steps ({_listed(counts)}); "
            "profile the same steps on every rank"
        )
    if not -len(steps[0]) <= step < len(steps[0]):
        raise ArgumentError(
            f"step must be one of the trace's {len(steps[0])}, from 0 (got {step})"
        )
    orders = [found[step] for found in steps]
    schedule = Schedule.from_orders([[ran.action for ran in order] for order in orders], name=name)
    begin = min(ran.start for order in orders for ran in order)
    start, end = (
        np.array([(getattr(ran, side) - begin) / 1e9 for order in orders for ran in order])
        for side in ("start", "end")
    )
    return Timeline(schedule, start, end, np.zeros(len(start)))


def _listed(counts: set[int]) -> str:
    return ", ".join(map(str, sorted(counts)))


def _in_order(processes: Sequence[ProfiledProcess]) -> list[ProfiledProcess]:
    said = [process.rank for process in processes]
    if len(set(said)) < len(said) and None not in said:
        raise ParseError(f"two traces are of rank {max(said, key=said.count)}")
    if None in said:
        return sorted(processes, key=lambda process: min(ran.action.stage for ran in process.ran))
    return sorted(processes, key=lambda process: process.rank or 0)


def _split_steps(ran: Sequence[_Ran]) -> list[list[_Ran]]:
    """Split a process's actions into steps: an action that repeats begins the next step.

    Only unsharding has no microbatch and comes before its step's first action.
    """
    steps: list[list[_Ran]] = [[]]
    seen: set[Action] = set()
    for item in ran:
        if item.action in seen:
            steps.append(_take_opening(steps[-1]))
            seen.clear()
        if item.action.kind.has_microbatch:
            seen.add(item.action)
        steps[-1].append(item)
    return steps


def _take_opening(step: list[_Ran]) -> list[_Ran]:
    """Take the unsharding off the end of a step; it opens the next one."""
    last = len(step)
    while last and step[last - 1].action.kind is Kind.UNSHARD:
        last -= 1
    opening = step[last:]
    del step[last:]
    return opening
