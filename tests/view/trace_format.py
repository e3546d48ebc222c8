"""A strict reader of the trace event format, written from its public description.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Only the phases that we write are known here: complete (X), flow (s, f), counter (C) and metadata
(M) events. Every field that an event must have is asked for, and every other one is refused.
"""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from math import isfinite
from typing import Any, TypeAlias

__all__ = ["Events", "check_trace", "flows_of"]

Events: TypeAlias = list[dict[str, Any]]

FIELDS = {
    "X": ({"ph", "name", "cat", "pid", "tid", "ts", "dur"}, {"args", "cname"}),
    "s": ({"ph", "name", "cat", "id", "pid", "tid", "ts"}, set()),
    "f": ({"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"}, set()),
    "C": ({"ph", "name", "pid", "ts", "args"}, set()),
    "M": ({"ph", "name", "pid", "args"}, {"tid"}),
}
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
# The reserved colours of the viewer that we use.
COLOURS = {
    "generic_work",
    "grey",
    "rail_idle",
    "rail_load",
    "rail_response",
    "terrible",
    "thread_state_runnable",
    "thread_state_uninterruptible",
    "thread_state_unknown",
}


def check_trace(text: str) -> Events:
    """Return the events of a trace after checking everything that a viewer relies on."""
    document = json.loads(text, parse_constant=refuse)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(document["otherData"], dict)
    events: Events = document["traceEvents"]
    for event in events:
        check_event(event)
    check_names(events)
    check_threads(events)
    check_flows(events)
    return events


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def check_event(event: dict[str, Any]) -> None:
    required, allowed = FIELDS[event["ph"]]
    assert required <= set(event) <= required | allowed, event
    assert isinstance(event["name"], str)
    assert event["name"]
    for name in {"pid", "tid", "id"} & set(event):
        assert type(event[name]) is int, event
        assert event[name] >= 0, event
    for name in {"ts", "dur"} & set(event):
        assert type(event[name]) in (int, float), event
        assert isfinite(event[name]), event
        assert event[name] >= 0, event
    check_arguments(event)


def check_arguments(event: dict[str, Any]) -> None:
    arguments = event.get("args", {})
    assert isinstance(arguments, dict)
    match event["ph"]:
        case "X":
            assert isinstance(event["cat"], str)
            assert event["cname"] in COLOURS
        case "f":
            assert event["bp"] == "e"
        case "C":
            assert arguments
            assert all(type(value) in (int, float) for value in arguments.values())
        case "M":
            key, kind = METADATA[event["name"]]
            assert set(arguments) == {key}
            assert type(arguments[key]) is kind
            assert ("tid" in event) == event["name"].startswith("thread_")


def check_names(events: Events) -> None:
    """Check that every process and thread with events is named once, and no other."""
    named = Counter((e["name"], e["pid"], e.get("tid")) for e in events if e["ph"] == "M")
    assert set(named.values()) == {1}
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xsf"}
    processes = {e["pid"] for e in events}
    for name in METADATA:
        found = {key[1:] for key in named if key[0] == name}
        assert found == (threads if name.startswith("thread_") else {(p, None) for p in processes})
    # A thread belongs to one process, because some viewers treat its number as global.
    assert len({tid for _, tid in threads}) == len(threads)


def check_threads(events: Events) -> None:
    """Check that slices of a thread do not overlap, even if cut to whole nanoseconds."""
    for slices in by_thread(event for event in events if event["ph"] == "X").values():
        for before, after in pairwise(slices):
            end = int(before["ts"] * 1000) + int(before["dur"] * 1000)
            assert end <= int(after["ts"] * 1000), (before, after)


def by_thread(events: Iterable[dict[str, Any]]) -> dict[int, Events]:
    threads: dict[int, Events] = {}
    for event in events:
        threads.setdefault(event["tid"], []).append(event)
    return threads


def check_flows(events: Events) -> None:
    """Check that every arrow has one start and one later end, each within its own slice."""
    sides: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    last: dict[str, Any] = {}
    for event in events:
        if event["ph"] == "X":
            last = event
        elif event["ph"] in sides:
            assert event["id"] not in sides[event["ph"]], event
            sides[event["ph"]][event["id"]] = event
            # Viewers process simultaneous events in the order of the file.
            assert last["tid"] == event["tid"], event
            assert last["ts"] <= event["ts"] <= last["ts"] + last["dur"], event
    assert set(sides["s"]) == set(sides["f"])
    for number, start in sides["s"].items():
        end = sides["f"][number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"]


def flows_of(events: Events) -> list[tuple[str, str]]:
    """Return the names of the slices at both ends of each arrow."""
    ends: dict[str, dict[int, str]] = {"s": {}, "f": {}}
    name = ""
    for event in events:
        if event["ph"] == "X":
            name = event["name"]
        elif event["ph"] in ends:
            ends[event["ph"]][event["id"]] = name
    return sorted((start, ends["f"][number]) for number, start in ends["s"].items())
