"""Small valid files of every form that Penstock reads, as their bytes."""

import gzip
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.files.flight.layout import HEADER, MAGIC, RECORD, SIGNS, VERSION
from penstock.files.flight.record_file import FlightWriter
from penstock.files.timeline import write_timeline
from penstock.ir.actions import Action, Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.choices import Choices
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.trace import write_trace

__all__ = [
    "cost_files",
    "flight_files",
    "layer_files",
    "order_files",
    "plan_files",
    "profiler_files",
    "schedule_files",
    "timeline_files",
    "trace_files",
]

_COSTS = Costs(
    forward=[1.0, 2.5],
    backward_input=0.1,
    backward_weight=[1e-3, 3],
    transfer=[[0, 0.5], [0.25, 0]],
    send=0.125,
    activation_bytes=2**30,
    message_bytes=[7, 9],
)
_LAYERS = {
    "transfer": 0.5,
    "layers": [
        {"name": "embedding", "forward": 1, "parameter_bytes": 1e3},
        {"name": "block", "repeat": 3, "forward": 2.5, "backward_input": 2, "message_bytes": 7},
    ],
}
_SIZES = {
    "transfer": 0.5,
    "sizes": [
        {"microbatch_size": 1, "layers": [{"name": "block", "forward": 1, "repeat": 2}]},
        {
            "microbatch_size": 4,
            "transfer": [[0, 1], [2, 0]],
            "layers": [{"name": "a", "forward": 3}, {"name": "b", "forward": 4.5}],
        },
    ],
}
_LAYERS_TOML = """\
transfer = 0.5

[[layers]]
name = "embedding"
forward = 1
parameter_bytes = 1e3

[[layers]]
name = "block"          # block.0 to block.2
repeat = 3
forward = 2.5
"""


@cache
def schedule_files() -> tuple[bytes, ...]:
    """Schedules as CSV: bare, with communication, overlaps, skips and copies."""
    small = build("1F1B", ranks=2, microbatches=2)
    skip = Schedule.from_orders(
        [["0F0", "2F0", "2B0", "0B0"], ["1F0", "1B0"]],
        dataflow=Dataflow(3, [(0, 1), (1, 2), (0, 2)]),
    )
    found = (
        small,
        lower(small),
        build("DualPipeV", ranks=2, microbatches=4),
        build("DualPipe", ranks=2, microbatches=2),
        lower(skip),
    )
    return tuple(_written(schedule.to_csv, "file.csv") for schedule in found)


@cache
def order_files() -> tuple[bytes, ...]:
    """Orders as torch writes them, with idle slots."""
    return b"0F0,0F1,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,\r\n", b"(0F0;1B0)OVERLAP_F_B,0UNSHARD\r\n"


@cache
def cost_files(ending: str) -> tuple[bytes, ...]:
    """Costs as TOML or JSON."""
    return tuple(_written(costs.to_file, f"file{ending}") for costs in (Costs(), _COSTS))


@cache
def layer_files(ending: str) -> tuple[bytes, ...]:
    """Layers as TOML or JSON."""
    if ending == ".toml":
        return (_LAYERS_TOML.encode(),)
    return json.dumps(_LAYERS).encode(), json.dumps(_SIZES, indent=1).encode()


@cache
def timeline_files() -> tuple[bytes, ...]:
    """Timelines as our own JSON."""
    return tuple(
        _written(partial(write_timeline, timeline), "file.json") for timeline in _timelines()
    )


@cache
def trace_files(ending: str) -> tuple[bytes, ...]:
    """Timelines as traces for viewers, compressed or not."""
    return tuple(
        _written(partial(write_trace, timeline), f"file{ending}") for timeline in _timelines()
    )


@cache
def plan_files() -> tuple[bytes, ...]:
    """Plans, with and without choices."""
    schedule = build("ZB-H1", ranks=2, microbatches=2)
    problem = SchedulingProblem.of(_COSTS, schedule.placement, 2, [4e9, float("inf")])
    choices = Choices(sizes=(3, 4), checkpointed=(0,), microbatch_size=2)
    plans = (Plan(problem, schedule, 1.0), Plan(problem, schedule, 1.0, choices))
    return tuple(_written(plan.to_file, "file.json") for plan in plans)


@cache
def profiler_files() -> tuple[bytes, ...]:
    """Traces in the form of torch's profiler: two steps on a host, and one on a device."""
    names = ("0F0", "0F1", "0B0", "0B1")
    host = [_range(name, 10.0 * place) for place, name in enumerate(names * 2)]
    device = [_range("0F0", 0.0), *_kernel(2.0, 5.0, 1), _range("0B0", 10.5), *_kernel(11, 20, 2)]
    fields = {"schemaVersion": 1, "distributedInfo": {"rank": 0}, "baseTimeNanoseconds": 10**18}
    plain = json.dumps({**fields, "traceEvents": host}).encode()
    return plain, json.dumps(device).encode(), gzip.compress(plain, mtime=0)


@cache
def flight_files() -> tuple[bytes, ...]:
    """Flight records of two ranks: one that waits for a message, one that has done nothing."""
    placement = np.array([0, 1], dtype="<u4").tobytes()
    send, forward = Action(Kind.SEND_F, 0, 0), Action(Kind.FORWARD, 0, 0)
    done, ahead = map(FlightWriter.encode, (forward, Action(Kind.FORWARD, 0, 1)))
    records = [
        RECORD.pack(3, 10.0, done, bytes(16), 0.0, 0.0, 11.0, 1),
        RECORD.pack(3, 11.5, ahead, FlightWriter.encode(send), 12.0, 0.0, 0.0, 2),
        *[bytes(RECORD.size)] * 2,
    ]
    names = b"host", b"1F1B"
    headers = [HEADER.pack(MAGIC, VERSION, 4, rank, 2, 77, 1e9, 5.0, *names) for rank in (0, 1)]
    rings = b"".join(records), bytes(4 * RECORD.size)
    return tuple(
        header + SIGNS.pack(13.0, 0.0) + placement + ring
        for header, ring in zip(headers, rings, strict=True)
    )


def _range(name: str, start: float) -> dict[str, Any]:
    place = {"cat": "user_annotation", "name": name, "pid": 70, "tid": 70}
    return {"ph": "X", **place, "ts": start, "dur": 10}


def _kernel(launched: float, start: float, link: int) -> list[dict[str, Any]]:
    arguments = {"correlation": link}
    return [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": start, "dur": 1.5, "args": arguments},
        {"ph": "X", "cat": "cuda_runtime", "ts": launched, "dur": 0.5, "args": arguments},
    ]


def _timelines() -> list[Timeline]:
    schedules = (
        build("1F1B", ranks=2, microbatches=2),
        lower(build("ZBV", ranks=2, microbatches=2)),
        build("DualPipe", ranks=2, microbatches=2),
    )
    return [simulate(schedule, Costs(forward=1 / 3, send=0.1)) for schedule in schedules]


def _written(write: Callable[[Path], None], name: str) -> bytes:
    with TemporaryDirectory() as folder:
        file = Path(folder, name)
        write(file)
        return file.read_bytes()
